import ast
import inspect
import re
import subprocess
import sys
from dataclasses import fields
from itertools import pairwise
from pathlib import Path

from ludic.training.metric_names import METRICS
from ludic.types import SampleOrigin

PAGE = (Path(__file__).parents[3] / "docs" / "rollouts.md").read_text()


def test_the_example_of_the_page_prints_what_it_says():
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (promised,) = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == promised, done.stderr


async def test_every_fact_of_an_items_origin_and_every_key_of_a_batchs_meta_is_explained():
    from tests.unit.batch_gen.parts import TotalReward, make_engine, request

    batch = await make_engine().generate_batch([request()], max_steps=1, credit_assigner=TotalReward())
    (body,) = ast.parse(inspect.getsource(SampleOrigin)).body
    explained = {
        field.target.id
        for field, text in pairwise(body.body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }
    assert explained == {field.name for field in fields(SampleOrigin)}
    info = {"number", "final_obs"}
    assert batch.items[0].meta.keys() - info - explained == {"request_meta"} and "`request_meta`" in PAGE
    names = {f"train/{re.sub('^reward/.*', 'reward/{component}', key)}" for key in batch.meta}
    assert names - METRICS.keys() == {"train/rollout_metrics"}, "which repeats the others"
