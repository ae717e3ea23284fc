"""How `make test` divides the files between its workers."""

from typing import Any

import pytest

ONE_VLLM_SERVER = ("test_live_vllm_client.py", "test_vllm_server.py", "test_vllm_training.py", "test_vllm_weights.py")
"""These share a session's vLLM servers, which take half a minute of computing each to start: one worker takes all of them."""

SECONDS_EACH = (
    "contract/test_cookbook.py", "cli/test_evaluate.py", "cli/test_cli.py", "cli/test_supervisor.py", "cli/test_train_command.py",
    "cli/test_run_teacher.py", "cli/test_launch.py", "cli/test_actor_command.py", "cli/test_train_runs.py",
    "cli/test_deploy.py", "cli/test_env_tools.py",
    "adapters/test_reasoning_gym.py", "adapters/test_textarena.py", "adapters/test_gymnasium.py", "envs/test_math_grading.py",
    "envs/test_math_datasets.py", "rustorio/test_rustorio.py", "pipeline/test_wire.py", "pipeline/test_pipeline_source.py",
    "pipeline/test_experience_queue.py", "pipeline/test_actor.py", "pipeline/test_pipeline_package.py",
    "pipeline/test_pipeline_machine.py", "scaling/test_measured.py", "scripts/test_push_to_hub.py",
    "scripts/test_calibrate_micro_batch.py", "models/test_threads.py", "inference/test_vllm_process.py", "eval/test_background.py",
    "tools/test_mcp_tools.py", "training/test_tinker_trainer.py", "minimal/test_minimal_tinker.py", "contract/test_tinker_page.py",
    "training/test_several_policies.py", "training/test_critic.py", "training/test_spo.py", "training/test_rft.py",
    "batch_gen/test_shared_rollouts.py", "inference/test_tinker_client.py",
)  # fmt: skip
"""Files that start processes, train models, or try thousands of cases: `make test-fast`, which has a minute, leaves them to `make test`."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.as_posix().endswith(SECONDS_EACH):
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByServer(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return "one vLLM server" if file.endswith(ONE_VLLM_SERVER) else file

    return ByServer(config, log)
