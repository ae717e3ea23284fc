import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.docs

PAGE = (Path(__file__).parents[3] / "docs" / "rollouts.md").read_text()


def test_the_example_of_the_page_prints_what_it_says():
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (promised,) = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == promised, done.stderr
