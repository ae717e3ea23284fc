import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

from ludic.types import SampleOrigin

PAGE = (Path(__file__).parents[3] / "docs" / "rollouts.md").read_text()


def test_the_example_of_the_page_prints_what_it_says():
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (promised,) = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == promised, done.stderr


async def test_the_page_names_every_fact_of_an_items_origin_and_every_key_of_a_batchs_meta():
    from tests.unit.batch_gen.parts import TotalReward, make_engine, request

    batch = await make_engine().generate_batch([request()], max_steps=1, credit_assigner=TotalReward())
    info = batch.items[0].meta.keys() & {"number", "final_obs"}
    facts = {field.name for field in fields(SampleOrigin)}
    for key in (batch.items[0].meta.keys() - info) | facts | batch.meta.keys():
        assert f"`{key.removeprefix('avg_')}`" in PAGE, key
