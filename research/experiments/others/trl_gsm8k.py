"""TRL's GRPO on GSM8K with the prompts, grading, batch, rate and test questions of `ludic train examples/configs/gsm8k.toml`.

Writes one line per update and per evaluation with the names of a run's metrics, so that both runs can be drawn in one picture over
the seconds spent in updates; evaluations, loading and vLLM's start are in neither:

    python research/experiments/others/trl_gsm8k.py --model QWEN --data gsm8k_train.jsonl --eval-data gsm8k_test.jsonl --out trl.jsonl
    ludic train examples/configs/gsm8k.toml --schedule constant --steps 40 --eval-every 8 … --name ludic
    ludic plot runs/ludic trl.jsonl --metric eval/accuracy --x seconds --out wall_clock.png

The rate is constant after its warm-up, so that a curve does not depend on how many updates were planned. The rest are TRL's
defaults: fp32 weights computed in bf16, a token mean, the correction for vLLM's log-probs. `--seconds` ends the training.
"""

import argparse
import json
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ALWAYS = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
"""FlashInfer's sampler compiles itself with nvcc, which a machine with only a driver lacks."""
WITH_VLLM = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
"""vLLM inside the trainer's process joins its process group, also if that has one member."""
CUT_OFF = -0.1
"""What a reply earns that runs out of tokens, as in Ludic's agents."""


def settings() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder with weights and tokenizer")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--eval-data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("trl.jsonl"))
    parser.add_argument("--questions", type=int, default=64, help="of an update")
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--micro", type=int, default=16, help="samples of a forward pass")
    parser.add_argument("--steps", type=int, default=64, help="updates at most")
    parser.add_argument("--seconds", type=float, default=300.0, help="of updates, after which the training ends")
    parser.add_argument("--eval-every", type=int, default=4)
    parser.add_argument("--eval-questions", type=int, default=0, help="0: all")
    parser.add_argument("--max-tokens", type=int, default=400)
    parser.add_argument("--lr", type=float, default=3e-6)
    parser.add_argument("--warm-up", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--vllm-share", type=float, default=0.3, help="of the GPU's memory; 0 generates with transformers"
    )
    return parser.parse_args()


def questions(path: Path) -> list[dict[str, Any]]:
    """The messages that Ludic's agent sends for each sample, and the right answer."""
    from ludic.envs.gsm8k import SYSTEM_PROMPT, GSM8KEnv

    found = []
    for line in filter(str.strip, path.read_text().split("\n")):  # splitlines also breaks a question at U+2028
        env = GSM8KEnv(json.loads(line))
        question, _ = env.env_reset()
        messages = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}]
        found.append({"prompt": messages, "target": env.target})
    return found


class Grader:
    """Ludic's reading and grading of a reply; the text of one that was cut off is not read."""

    def __init__(self, tokenizer: Any, ends: set[int], max_tokens: int) -> None:
        self._tokenizer, self._ends, self._max_tokens = tokenizer, ends, max_tokens

    def is_cut_off(self, ids: Sequence[int]) -> bool:
        return len(ids) >= self._max_tokens and ids[-1] not in self._ends

    def reward(self, ids: Sequence[int], target: str) -> float:
        from ludic.envs.math_grading import is_equivalent
        from ludic.parsers import final_number_parser

        if self.is_cut_off(ids):
            return CUT_OFF
        answer = final_number_parser(self._tokenizer.decode(ids, skip_special_tokens=True)).action
        return float(answer is not None and is_equivalent(answer, target))


class Record:
    """The lines of the file, and the seconds spent in updates."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w")
        self.seconds = 0.0

    def write(self, step: int, **values: float) -> None:
        row = {"step": step, "time": time.time(), **{name: float(f"{value:.6g}") for name, value in values.items()}}
        print(f"{self.seconds:.0f} s", json.dumps(row), flush=True)
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()


def greedy(trainer: Any, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """Greedy replies of the current weights."""
    if trainer.use_vllm:
        from vllm import SamplingParams

        trainer.vllm_generation.sync_weights()
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        asked = [{"prompt_token_ids": list(ids)} for ids in prompts]
        outputs = trainer.vllm_generation.llm.generate(asked, sampling_params=params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]
    import torch

    model, found = trainer.accelerator.unwrap_model(trainer.model), []
    for ids in prompts:
        with torch.no_grad():
            given = torch.tensor([list(ids)], device=model.device)
            made = model.generate(
                given, attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=max_tokens
            )
        found.append(made[0, len(ids) :].tolist())
    return found


def main() -> None:
    args = settings()
    os.environ.update(ALWAYS)
    use_vllm = args.vllm_share > 0
    if use_vllm:
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            os.environ.update(WITH_VLLM, MASTER_PORT=str(one.getsockname()[1]))
    import datasets
    import torch
    import trl
    from transformers import AutoTokenizer, TrainerCallback

    from ludic.eval.statistics import share_estimate
    from ludic.inference import HFChatTemplate

    # Each hash names a state of the data in a cache that is not used; dill fails on pyarrow's types in some versions.
    numbers = iter(range(1 << 30))
    datasets.fingerprint.Hasher.hash = classmethod(lambda cls, value: f"{next(numbers):016x}")
    on_gpu = torch.cuda.is_available()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    train, test = questions(args.data), questions(args.eval_data)[: args.eval_questions or None]
    template = HFChatTemplate(tokenizer)
    test_prompts = [template.apply(each["prompt"]).prompt_token_ids.tolist() for each in test]
    theirs = tokenizer.apply_chat_template(test[0]["prompt"], add_generation_prompt=True, return_dict=True)["input_ids"]
    assert list(theirs) == test_prompts[0], "TRL's prompts must be Ludic's"
    record, held = Record(args.out), {}

    def rewards(completion_ids: list[list[int]], target: list[str], **_: Any) -> list[float]:
        grader = held["grader"]
        found = [grader.reward(ids, right) for ids, right in zip(completion_ids, target, strict=True)]
        held["reward"] = sum(found) / len(found)
        held["cut_off"] = sum(map(grader.is_cut_off, completion_ids)) / len(found)
        held["length"] = sum(map(len, completion_ids)) / len(found)
        return found

    def evaluate(step: int) -> None:
        began = time.perf_counter()
        replies = greedy(held["trainer"], test_prompts, args.max_tokens)
        grader = held["grader"]
        right = [float(grader.reward(ids, each["target"]) == 1.0) for ids, each in zip(replies, test, strict=True)]
        accuracy = share_estimate(right)
        record.write(
            step,
            **{
                "eval/accuracy": accuracy.mean,
                "eval/accuracy_low": accuracy.low,
                "eval/accuracy_high": accuracy.high,
                "eval/over_limit_rate": sum(map(grader.is_cut_off, replies)) / len(replies),
                "eval/mean_completion_tokens": sum(map(len, replies)) / len(replies),
                "eval/num_samples": len(test),
                "eval/step": step,
                "perf/eval_s": time.perf_counter() - began,
            },
        )

    class Clock(TrainerCallback):
        """An update lasts from the end of the one before, or of its evaluation."""

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            evaluate(0)
            self.began = time.perf_counter()

        def on_step_end(self, _: Any, state: Any, control: Any, **__: Any) -> Any:
            if on_gpu:
                torch.cuda.synchronize()
            taken = time.perf_counter() - self.began
            record.seconds += taken
            names = {"reward": "avg_total_reward", "cut_off": "over_limit_rate", "length": "avg_completion_length"}
            record.write(
                state.global_step,
                **{"perf/step_s": taken, **{f"train/{name}": held[key] for key, name in names.items()}},
            )
            is_last = state.global_step >= args.steps or record.seconds >= args.seconds
            if is_last or state.global_step % args.eval_every == 0:
                evaluate(state.global_step)
            control.should_training_stop = is_last
            self.began = time.perf_counter()
            return control

    num_samples = args.questions * args.group
    longest = max(map(len, test_prompts))
    generation: dict[str, Any] = {}
    if use_vllm:
        generation = {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_gpu_memory_utilization": args.vllm_share,
            "vllm_max_model_length": -(-(2 * longest + args.max_tokens) // 256) * 256,
        }
    trainer = held["trainer"] = trl.GRPOTrainer(
        model=args.model,
        processing_class=tokenizer,
        reward_funcs=rewards,
        train_dataset=datasets.Dataset.from_list(train),
        callbacks=[Clock()],
        args=trl.GRPOConfig(
            output_dir=str(args.out.with_suffix("")),
            per_device_train_batch_size=args.micro,
            gradient_accumulation_steps=num_samples // args.micro,
            num_generations=args.group,
            max_completion_length=args.max_tokens,
            max_steps=args.steps,
            temperature=1.0,
            learning_rate=args.lr,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=args.warm_up,
            weight_decay=0.01,
            bf16=on_gpu,
            use_cpu=not on_gpu,
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            seed=args.seed,
            **generation,
        ),
    )
    stops = trainer.model.generation_config.eos_token_id
    ends = {tokenizer.eos_token_id, *(stops if isinstance(stops, list) else [stops])}
    held["grader"] = Grader(tokenizer, ends, args.max_tokens)
    trainer.train()
    print(f"TRL {trl.__version__}: {trainer.state.global_step} updates in {record.seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
