"""Reference solutions of HumanEval and MBPP pass their tests in the real sandbox; mutated ones do not.

`make test` takes every fourth problem; `pytest -m diagnostic` of this file takes all of them, after a change of the data.
"""

import ast
import asyncio
from collections.abc import Iterator

import pytest

from ludic_sandbox import create_sandbox_pool
from ludic_sandbox.bubblewrap import bubblewrap_problem
from ludic_sandbox.code_exec import CodeExecConfig, CodeExecEnv, HumanEvalEnv, MBPPEnv
from tests.data import read_jsonl
from tests.extended import cases

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.skipif(bool(bubblewrap_problem()), reason=bubblewrap_problem()),
    pytest.mark.filterwarnings("ignore:invalid escape sequence"),  # in some of the references
]

PATIENT = CodeExecConfig(timeout_per_test_s=60.0)  # one MBPP reference takes seconds on a machine that others use too
BRIEF = CodeExecConfig(timeout_per_test_s=3.0)  # a mutant may loop without end
MAX_MUTANTS = 6  # tried until one is caught; some are no mistakes at all


class Mutation(ast.NodeTransformer):
    """Changes the n-th thing that can be changed: a comparison, an operator, a constant."""

    COMPARE = {ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt,
               ast.In: ast.NotIn, ast.NotIn: ast.In}  # fmt: skip
    BINARY = {
        ast.Add: ast.Sub,
        ast.Sub: ast.Add,
        ast.Mult: ast.Add,
        ast.Div: ast.Mult,
        ast.FloorDiv: ast.Mult,
        ast.Mod: ast.Add,
    }

    def __init__(self, target: int) -> None:
        self.target, self.seen = target, 0

    def is_it(self) -> bool:
        self.seen += 1
        return self.seen - 1 == self.target

    def visit_Expr(self, node: ast.Expr) -> ast.Expr:
        return node if isinstance(node.value, ast.Constant) else self.generic_visit(node)  # not docstrings

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        if type(node.ops[0]) in self.COMPARE and self.is_it():
            node.ops[0] = self.COMPARE[type(node.ops[0])]()
        return self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        if type(node.op) in self.BINARY and self.is_it():
            node.op = self.BINARY[type(node.op)]()
        return self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, bool | int | float | str) and self.is_it():
            value = node.value
            node.value = (
                (not value) if isinstance(value, bool) else value + "x" if isinstance(value, str) else value + 1
            )
        return node

    def visit_Return(self, node: ast.Return) -> ast.AST:
        if node.value is not None and self.is_it():
            node.value = ast.Tuple([node.value, ast.Constant("wrong")], ast.Load())
        return self.generic_visit(node)

    def visit_While(self, node: ast.While) -> ast.AST:
        """A mutated loop condition costs the whole time limit."""
        node.body = [self.visit(child) for child in node.body]
        return node


def mutants(source: str) -> Iterator[str]:
    """From the last change that can be made to the first: what a function ends with decides most."""
    count = Mutation(-1)
    count.visit(ast.parse(source))
    for target in reversed(range(count.seen)):
        yield ast.unparse(ast.fix_missing_locations(Mutation(target).visit(ast.parse(source))))


async def reward(env: CodeExecEnv, code: str) -> float:
    await env.async_reset(seed=0)
    return (await env.async_step({"agent_0": code}))["agent_0"].reward


async def problem_holds(make: type[CodeExecEnv], sample: dict, pool: object) -> tuple[float, bool]:
    """(reward of the reference, whether a mutant was caught)."""
    patient, brief = (make(sample, sandbox_pool=pool, config=config) for config in (PATIENT, BRIEF))
    reference = patient.reference_action("agent_0")
    earned = await reward(patient, reference)
    for _, mutant in zip(range(MAX_MUTANTS), mutants(reference), strict=False):
        if await reward(brief, mutant) < 1.0:
            return earned, True
    return earned, False


@pytest.mark.parametrize("nth", [4, pytest.param(1, marks=pytest.mark.diagnostic)], ids=["every fourth", "all"])
@pytest.mark.parametrize(
    ("make", "data", "count"),
    cases(
        [(HumanEvalEnv, "humaneval", 120), (MBPPEnv, "mbpp_sanitized", 427)], default=[(HumanEvalEnv, "humaneval", 120)]
    ),
)
async def test_a_reference_earns_the_full_reward_and_a_mutant_of_it_does_not(make, data, count, nth):
    samples = read_jsonl(data)
    assert len(samples) == count
    async with await create_sandbox_pool(n_workers=3) as pool:
        limit = asyncio.Semaphore(3)

        async def one(sample: dict) -> tuple[str, float, bool]:
            async with limit:
                return (str(sample["task_id"]), *await problem_holds(make, sample, pool))

        results = await asyncio.gather(*map(one, samples[::nth]))
    assert [id for id, earned, _ in results if earned != 1.0] == []
    assert [id for id, _, caught in results if not caught] == []
