"""The package loads without Redis, and says what to install where it is needed."""

import subprocess
import sys
import textwrap

WITHOUT_REDIS = """
import sys
sys.modules["redis"] = None  # as if it were not installed
"""


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_all_of_it_loads_without_redis_and_without_torch():
    code = """
    import ludic.batch_gen
    from ludic_pipeline.queue import PipelineBatchSource, run_pipeline_actor, PipelineStats
    print({"torch", "transformers", "zstandard"} & set(sys.modules))
    """
    assert run_python(WITHOUT_REDIS + textwrap.dedent(code)) == "set()"


def test_a_missing_redis_names_its_extra():
    code = """
    from ludic_pipeline.queue import PipelineBatchSource
    from ludic.types import MissingExtra
    try:
        PipelineBatchSource("redis://localhost")
    except MissingExtra as error:
        print(error)
    """
    assert "pip install 'ludic-rl[pipeline] @ git" in run_python(WITHOUT_REDIS + textwrap.dedent(code))


def test_loading_the_package_loads_nothing_of_it():
    code = """
    import sys, ludic_pipeline.queue
    print([name for name in sys.modules if name.startswith("ludic_pipeline.queue.") or name == "redis"])
    """
    assert run_python(code) == "[]"
