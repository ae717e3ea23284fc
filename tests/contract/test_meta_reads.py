"""Facts are fields: Ludic's own facts about a sample are in `SAWItem.origin`, and `meta` is the user's.

Every place in src/ludic that reads a `meta` by a literal key is listed here with its reason; a new one fails. To know
something about a sample, add a field to `SampleOrigin`; about a rollout, a property to `Rollout`.
"""

import ast
from collections import Counter
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2] / "src" / "ludic"
METAS = {"meta", "request_meta", "metas"}
READING_METHODS = {"get", "pop", "setdefault"}

HOME = "the one reader of this fact: everything else asks Rollout or RolloutRequest"
USER = "user-supplied: the env's info or the request's meta"
BATCH = "of a batch, not of a sample: what its source counted"

ALLOWED = {
    ("types/rollout.py", "request_meta"): HOME,
    ("types/rollout.py", "agent_id"): HOME,
    ("types/rollout.py", "delegate"): HOME,
    ("types/rollout.py", "parent_step_id"): HOME,
    ("types/rollout.py", "gateway"): HOME,
    ("types/rollout.py", "model"): HOME,
    ("types/rollout.py", "env_name"): HOME,
    ("types/rollout.py", "engine"): HOME,
    ("types/rollout.py", "env_seed"): HOME,
    ("types/rollout.py", "sampling_seed"): HOME,
    ("types/rollout.py", "group_id"): HOME,
    ("types/rollout.py", "objective"): HOME,
    ("types/requests.py", "group_id"): HOME,
    ("batch_gen/store.py", "group_id"): "of a line that is indexed without decoding its rollout",
    ("batch_gen/store.py", "engine"): "the writer adds to what the engine wrote",
    ("types/rollout.py", "domain"): HOME,
    ("batch_gen/sources/teachers.py", "hint"): USER,
    ("batch_gen/requests/curriculum.py", "task_index"): "the curriculum wrote it into its own requests",
    ("batch_gen/requests/streams.py", "difficulty"): "the curriculum wrote it into its own requests",
    ("eval/outcome.py", "task_id"): USER,
    ("eval/outcome.py", "sample_index"): USER,
    ("eval/outcome.py", "episode_idx"): "the engine's number of an episode, for records.jsonl",
    ("eval/ratings.py", "policies"): "assign_roles wrote it into the request",
    ("training/sample_check.py", "result"): USER,
    ("training/learner/metrics.py", "result"): USER,
    ("interaction/delegating.py", "parent_rollout_id"): "written here, once",
    ("batch_gen/sources/asynchronous.py", "rollout_metrics"): BATCH,
    ("batch_gen/sources/rollouts.py", "rollout_metrics"): BATCH,
    ("batch_gen/sources/shared.py", "rollout_metrics"): BATCH,
    ("batch_gen/sources/shared.py", "num_rollouts"): BATCH,
    ("training/learner/batches.py", "unscored_because"): BATCH,
    ("training/learner/batches.py", "target_rollouts"): BATCH,
    ("cli/eval/run.py", "sample_index"): "fixed_requests wrote it into the request",
}


def is_meta(node: ast.expr) -> bool:
    """`item.meta`, a variable of that name, a list's element, or a call that returns one."""
    match node:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name in METAS
        case ast.Call(func=ast.Attribute(value=value, attr="get")) | ast.Subscript(value=value):
            return is_meta(value)
        case ast.Call(func=ast.Name(id=name)):
            return name.startswith("request_meta")
        case ast.BoolOp(values=[first, *_]):
            return is_meta(first)
    return False


def key_read(node: ast.AST) -> str | None:
    """The literal key by which the node reads a meta; None where it does not."""
    match node:
        case ast.Subscript(value=value, slice=ast.Constant(value=str(key)), ctx=ast.Load()) if is_meta(value):
            return key
        case ast.Call(func=ast.Attribute(value=value, attr=method), args=[ast.Constant(value=str(key)), *_]):
            return key if method in READING_METHODS and is_meta(value) else None
        case ast.Compare(left=ast.Constant(value=str(key)), ops=[ast.In() | ast.NotIn()], comparators=[value]):
            return key if is_meta(value) else None
        case ast.AugAssign(target=ast.Subscript(value=value, slice=ast.Constant(value=str(key)))) if is_meta(value):
            return key
    return None


def reads_in(text: str) -> list[str]:
    return [key for node in ast.walk(ast.parse(text)) if (key := key_read(node)) is not None]


def test_meta_is_read_by_a_literal_key_only_where_the_list_says():
    found = {(str(file.relative_to(ROOT)), key) for file in ROOT.rglob("*.py") for key in reads_in(file.read_text())}
    assert not found - ALLOWED.keys(), "a fact that only grep can find: make it a field of SampleOrigin or of Rollout"
    assert not ALLOWED.keys() - found, "no longer read; take it off the list"


def test_every_way_to_read_a_meta_is_seen():
    ways = """
item.meta["a"]
item.meta.get("a")
items[0].meta.get("a", 0)
rollout.meta.setdefault("a", 1)
"a" in item.meta
"a" not in meta
meta["a"]["b"]
rollout.meta.get("b", {}).get("a")
(head.meta.get("b") or {}).get("a")
rollout.request_meta["a"]
request_meta_in(meta).get("a")
rollout.meta["a"] |= {}
metas[0]["a"]
"""
    assert Counter(reads_in(ways)) == {"a": 13, "b": 3}
    free = (
        'item.meta[name]\nitem.meta.get(name)\nitem.meta["a"] = 1\nitem.origin.reward\ninfo["a"]\nfor k in item.meta: k'
    )
    assert reads_in(free) == []
