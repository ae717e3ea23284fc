"""The exported file: one script, escaped data, a policy that allows nothing else; and rules that the page's own files keep."""

import base64
import hashlib
import json
import re
from typing import Any

import pytest

from ludic_view.export import PAGE, answers_for, bundled, export_page, page_of

HOSTILE = "</script><script>alert(1)</script><!-- & '"


def card(id: str, **facts: Any) -> dict[str, Any]:
    usual = {"step": 1, "group": "g", "task": "t", "reward": 1.0, "tokens": 3, "preview": HOSTILE, "versions": [0, 0]}
    return {"id": id, **usual, "started_ns": 1, "ended_ns": 2, **facts}


CARDS = [card("a", reward=0.0), card("b"), card("c", group="other", task="t2", step=2)]


def answer(path: str) -> dict[str, Any]:
    """A server with three rollouts in two groups."""
    rest = path.removeprefix("/api/runs").removeprefix("/x%2Fy")
    if path == "/api/runs":
        return {"root": "/secret/place", "runs": [{"id": "x/y", "name": "y"}, {"id": "another", "name": "another"}]}
    if found := re.fullmatch(r"/rollouts/(\w+)", rest):
        (one,) = [c for c in CARDS if c["id"] == found[1]]
        return {**one, "turns": [{"number": 0, "steps": []}], "meta": {"a": HOSTILE}, "prompt": {"text": [], "id": []}}
    if found := re.fullmatch(r"/groups/(\w+)", rest):
        return {"group": found[1], "cards": [c for c in CARDS if c["group"] == found[1]], "tree": {"nodes": []}}
    return {
        "": {"id": "x/y", "metrics": [], "num_rollouts": 3},
        "/metrics": {"steps": [1], "columns": {}},
        "/steps": {"steps": [{"step": 1}, {"step": 2}, {"step": 3}]},
        "/health": {"advisories": []},
    }[rest]


def answers_in(page: str) -> dict[str, Any]:
    (text,) = re.findall(r'<script type="application/json" id="answers">(.*?)</script>', page, flags=re.DOTALL)
    return json.loads(text)


def test_the_policy_names_the_script_and_the_style_by_hash_and_allows_no_request():
    page = export_page(answer, "x/y", ["a"], title=f"Title {HOSTILE}")
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    (script,) = re.findall(r'<script type="module">(.*?)</script>', page, flags=re.DOTALL)
    (style,) = re.findall(r"<style>(.*?)</style>", page, flags=re.DOTALL)
    for text, kind in ((script, "script-src"), (style, "style-src")):
        assert f"{kind} 'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" in policy
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy
    assert (
        page.lower().count("<script") == 2
        and "src=" not in page.split("<style>")[0]
        and "href=" not in page.split("<style>")[0]
    )


def test_text_of_a_model_cannot_end_the_data():
    page = export_page(answer, "x/y", ["a", "b"])
    assert "<script>alert" not in page and "<!--" not in page
    assert answers_in(page)["api/runs/x%2Fy/rollouts/a"]["meta"] == {"a": HOSTILE}


def test_only_the_chosen_rollouts_are_inside_and_a_group_only_as_a_whole():
    answers = answers_for(answer, "x/y", ["a", "c"])
    base = "api/runs/x%2Fy"
    assert [c["id"] for c in answers[f"{base}/rollouts"]["rollouts"]] == ["a", "c"]
    assert f"{base}/groups/g" not in answers and f"{base}/groups/other" in answers
    assert [g["rewards"] for g in answers[f"{base}/groups"]["groups"]] == [[0.0], [1.0]]
    assert [row["step"] for row in answers[f"{base}/steps"]["steps"]] == [1, 2]
    assert answers[f"{base}/tasks/t2"]["by_step"] == [{"step": 2, "rewards": [1.0], "rollouts": ["c"]}]
    assert answers["api/runs"] == {"root": "", "runs": [{"id": "x/y", "name": "y"}]}
    assert f"{base}/groups/g" in answers_for(answer, "x/y", ["a", "b"])


def test_an_export_of_nothing_is_refused():
    with pytest.raises(ValueError, match="choose at least one rollout"):
        export_page(answer, "x/y", [])


def test_numbers_that_are_not_json_are_refused():
    with pytest.raises(ValueError, match="not JSON compliant"):
        page_of({"x": float("nan")}, title="t")


def test_modules_become_one_script_in_the_order_of_their_imports(tmp_path):
    (tmp_path / "main.js").write_text(
        'import { twice } from "./math.js";\nimport { name } from "./words.js";\nuse(twice(2), name);\n'
    )
    (tmp_path / "math.js").write_text(
        'import { name } from "./words.js";\nexport function twice(x) { return 2 * x; }\n'
    )
    (tmp_path / "words.js").write_text(
        'export const name = "n";\nexport class Word {}\nexport async function load() {}\n'
    )
    script = bundled(tmp_path / "main.js")
    assert script.index("modules.words =") < script.index("modules.math =") < script.index("modules.main =")
    assert "return { name, Word, load };" in script and "const { twice } = modules.math;" in script
    assert not re.search(r"^(import|export) ", script, flags=re.MULTILINE)


def test_a_circle_of_modules_and_an_unknown_form_of_export_are_named(tmp_path):
    (tmp_path / "a.js").write_text('import { b } from "./b.js";\n')
    (tmp_path / "b.js").write_text('import { a } from "./a.js";\n')
    with pytest.raises(ValueError, match="a → b → a"):
        bundled(tmp_path / "a.js")
    (tmp_path / "b.js").write_text("export default 1;\n")
    with pytest.raises(ValueError, match=r"b\.js has an import or export"):
        bundled(tmp_path / "a.js")


@pytest.mark.parametrize("file", sorted(PAGE.iterdir()), ids=lambda file: file.name)
def test_the_page_parses_no_text_as_markup_and_names_no_other_host(file):
    text = file.read_text()
    forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|createContextualFragment|\beval\(|new Function|setAttribute\(\"style\"|javascript:"
    assert re.findall(forbidden, text) == []
    assert set(re.findall(r"https?://[^\s\"']+", text)) <= {"http://www.w3.org/2000/svg"}


def test_the_page_has_nothing_inline():
    html = (PAGE / "index.html").read_text()
    assert re.findall(r"\sstyle=|\son\w+=|<style|<script(?![^>]*src=)", html) == []
