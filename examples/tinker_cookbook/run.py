"""Run a recipe of tinker_cookbook, unchanged, against a Tinker-compatible server. See docs/tinker-server.md.

    python examples/tinker_cookbook/run.py math_rl.train env=arithmetic groups_per_batch=8 learning_rate=2e-4 max_steps=20

The first word is the recipe's module below `tinker_cookbook.recipes`; the rest are its settings, as the cookbook documents them.
The recipe runs in a folder that stands in for the hub (stand_ins.py), so that tokenizers and datasets come from disk.
$TINKER_BASE_URL names the server (default: http://127.0.0.1:8000) and $TINKER_API_KEY the key.

Shows: supervised learning, RL, on-policy distillation, DPO and multi-turn RL by programs that were written for Tinker's service.
Needs: a server (`make tinker` starts one with smollm2-135m); the extra `cookbook` and tinker-cookbook 0.5.8.
Takes: about ten seconds to start; then as long as the recipe does.
"""

import argparse
import os
import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any

from stand_ins import MODEL, write_stand_ins

HUB = Path.home() / ".cache/ludic/tinker_cookbook"
RENDERER = "qwen3_instruct"
"""ChatML, without the system message that SmolLM2's own template begins with."""
ENVIRONMENT = {
    "TINKER_BASE_URL": "http://127.0.0.1:8000",
    "TINKER_API_KEY": "tml-local",  # the SDK wants one; a server without keys takes any
    "TINKER_TELEMETRY": "0",
    "HF_HUB_OFFLINE": "1",
}


def know_model(name: str, renderer: str) -> None:
    """tinker_cookbook asks a table of the hosted models for the chat format of a model. Add the server's model to it."""
    from tinker_cookbook import model_info

    known = model_info.get_model_attributes

    def attributes(asked: str) -> Any:
        if asked == name:
            return model_info.ModelAttributes("", "", "", is_chat=True, recommended_renderers=(renderer,))
        return known(asked)

    model_info.get_model_attributes = attributes


def run_recipe(recipe: str, settings: list[str], *, hub: Path, renderer: str) -> None:
    """Run `python -m tinker_cookbook.recipes.RECIPE SETTINGS` in the folder `hub`."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    model = next((word.partition("=")[2] for word in settings if word.startswith("model_name=")), MODEL)
    write_stand_ins(hub, model)
    os.chdir(hub)
    know_model(model, renderer)
    sys.argv = [recipe, f"model_name={model}", *(word for word in settings if not word.startswith("model_name="))]
    with (
        tempfile.TemporaryDirectory() as cache
    ):  # datasets would take an old copy from its cache when a file has changed
        os.environ.setdefault("HF_DATASETS_CACHE", cache)
        runpy.run_module(f"tinker_cookbook.recipes.{recipe}", run_name="__main__", alter_sys=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hub", type=Path, default=HUB, help=f"the folder; filled on first use (default: {HUB})")
    parser.add_argument("--renderer", default=RENDERER, help=f"chat format of the model (default: {RENDERER}, ChatML)")
    parser.add_argument("recipe", help="for example sl_loop, math_rl.train, preference.dpo.train")
    parser.add_argument("settings", nargs="*", help="name=value, as the recipe takes them")
    given = parser.parse_args()
    run_recipe(given.recipe, given.settings, hub=given.hub.absolute(), renderer=given.renderer)


if __name__ == "__main__":
    main()
