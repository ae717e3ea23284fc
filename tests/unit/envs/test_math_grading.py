import asyncio
import os
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from ludic.envs.math_grading import async_is_equivalent, is_equivalent
from ludic.envs.math_worker import MathWorker
from ludic.types import MissingExtra

pytestmark = pytest.mark.slow

TOWER = "9^{9^{9^{9}}}"  # sympy would compute it

# Without algebra: no worker, no math-verify.
EXACT_AND_RIGHT = [
    ("18", "18"),
    ("018", "18"),
    ("-0", "0"),
    ("123456789012345678901234567890", "123456789012345678901234567890.0"),
    ("18.0", "18"),
    ("18.", "18"),
    ("+18", "18"),
    ("$18", "18"),
    (r"\$18.00", "18"),
    ("$18$", "18"),
    (r"\( 18 \)", "18"),
    ("36/2", "18"),
    ("1,000", "1000"),
    ("1,000,000.50", "1000000.5"),
    (r"10,\!080", "10080"),
    (r"11,\! 111,\! 100", "11111100"),
    ("1{,}000", "1000"),
    (r"1\,000", "1000"),
    ("-7", "−7"),
    (".5", "0.5"),
    (r"\frac{1}{2}", "0.5"),
    (r"\dfrac{1}{2}", r"\frac12"),
    (r"\frac 59", "5/9"),
    (r"\frac9{19}", r"\frac{9}{19}"),
    (r"-\frac{35}{9}", r"\frac{-35}{9}"),
    (r"1\frac{4}{5}", "1.8"),
    ("137 1/2", "137.5"),
    ("50%", "50"),
    (r"50\%", "0.5"),
    ("0.5", r"50\%"),
    ("12.5 percent", "12.5"),
    ("18 apples", "18"),
    ("18 dollars", r"\$18"),
    (r"5.4 \text{ cents}", "5.4"),
    (r"5\text{ cm}", "5 centimeters"),
    ("5cm", "5"),
    ("864 square inches", r"864 \mbox{ inches}^2"),
    ("3 miles per hour", "3"),
    ("18 km/h", r"18\text{ km/h}"),
    ("18 gallons of milk", "18"),
    (r"90^\circ", "90"),
    ("90°", "90 degrees"),
    ("52_{8}", "52_8"),
    ("52", "52_8"),
    (r"\text{Evelyn}", "evelyn"),
    ("C", r"\text{(C)}"),
    (r"\textbf{(C)}", "(C)"),
    ("no solution", r"\text{no solution}"),
    (r"\left( 3, \frac{\pi}{2} \right)", r"(3, \frac{\pi}{2})"),
    ("p-q", "p - q"),
    ("1.5e3", "1500"),
    (r"0.1\overline{6}", "1/6"),
    ("18 thousand", "18000"),
    (r"\$1.5 \text{ million dollars}", "1,500,000"),
    ("2 dozen eggs", "24"),
    ("$5 per hour", "5 dollars per hour"),
    ("2½", "2.5"),
    ("5 cm²", "5 cm^2"),
    ("= 18", "18"),
    ("No", "no"),
    ("YES", "yes"),
    ("Two", "two"),
    ("x-axis", "x-axis"),
    ("A, B and C", "A, B, C"),
    (r"\text{A and B}", "A, B"),
    (r"x \cdot y", "xy"),
    ("x y", "xy"),
    ("HTH", r"\text{HTH}"),
]
EXACT_AND_WRONG = [
    ("on", "no"),
    ("tow", "two"),
    ("BAC", "ABC"),
    ("TFF", "FTF"),
    ("IV", "VI"),
    ("yx", "xy"),
    (r"y \cdot x", "xy"),
    ("pq", "PQ"),
    ("C, B, A", "A, B, C"),
    ("B and A", "A and B"),
    (r"\text{A}, \text{B}", r"\text{B}, \text{A}"),
    ("HT, TH", "TH, HT"),
    ("A, B", "A, B, C"),
    ("no solution", "no"),
    ("solution", "no solution"),
    ("1", "one"),
    ("12", "AB"),
    ("A+B", "AB"),
    ("1,1,2", "1,2"),
    (r"\vec{b} \times \vec{a}", r"\vec{a} \times \vec{b}"),
    ("17", "18"),
    ("-18", "18"),
    ("1.8", "18"),
    ("0.333333", r"\frac{1}{3}"),
    ("0.0000001", "0.0000002"),
    ("18.0000000001", "18"),
    ("1000.1", "1,000"),
    ("2/36", "18"),
    ("1 1/2", "1"),
    (r"1\frac{1}{2}", r"\frac{1}{2}"),
    ("0.5%", "0.5"),
    ("1%", "1"),
    ("5 feet", "5 inches"),
    ("5 inches", r"5\text{ inches}^2"),
    ("18 cents", r"\$18"),
    ("$5 per hour", "$5 per day"),
    ("5 million", "5"),
    ("1e400", "1e401"),
    (r"0.\overline{3}", "0.3"),
    ("52_9", "52_8"),
    ("42", "52_8"),
    ("40_9", "40"),
    ("18 19", "18"),
    ("18 19", "1819"),
    ("18 19", "37"),
    ("1 000", "0"),
    (r"\text{east}", r"\text{seat}"),
    ("east", "seat"),
    (r"\text{even}", r"\text{odd}"),
    ("D", r"\text{(C)}"),
    ("5", r"\text{five}"),
    (r"\{1,2\}", "(1,2)"),
    ("(3,5,7)", r"\{3,5,7\}"),
    ("5} \\boxed{18", "18"),
    ("", "18"),
    (" ", " "),
    ("{" * 500, "18"),
    ("1E3_{16}", "1000_{16}"),
    (r"\frac{1}{" * 50, "18"),
    ("9" * 100_000, "18"),
    ("x" * 100_000, "x"),
]
ALGEBRA_AND_RIGHT = [
    (r"\sqrt{8}", r"2\sqrt2"),
    (r"\frac{1}{\sqrt{3}}", r"\frac{\sqrt3}{3}"),
    (r"6\sqrt{2}\text{ cm}", r"6\sqrt2"),
    (r"9 + 9", "18"),
    (r"1.5 \times 10^{3}", "1500"),
    ("2^{10}", "1024"),
    (r"\log_2 8", "3"),
    (r"\binom{5}{2}", "10"),
    ("2π", r"2 \pi"),
    (r"0.1\pi", r"\frac{\pi}{10}"),
    ("2.0", r"\sqrt{4}"),
    (r"\pi", "3.14159265358979"),
    ("x^2+2x+1", "(x+1)^2"),
    ("-q+p", "p - q"),
    (r"\pi R^2 - \pi r^2", r"\pi(R^2-r^2)"),
    ("9i+6", "6+9i"),
    ("(1+i)^2", "2i"),
    ("a_i + 1", "1 + a_i"),
    ("sin x", r"\sin x"),
    ("√(x+1)", r"\sqrt{x+1}"),
    (r"4\pi\text{ cm}", r"4\pi"),
    ("x = 9 + 9 = 18", "18"),
    ("a + b = 7", "7"),
    ("x = 0", "0"),
    ("x=5", "5"),
    ("5", "x=5"),
    ("x=2.5", "x=5/2"),
    (r"x = -2.5\text{ cm}", r"x=-\frac{5}{2}"),
    ("y=.5", "y=1/2"),
    ("x=2.0", "x=2"),
    ("x=1,234.5", r"x=\frac{2469}{2}"),
    ("x^2=2.25", r"x^2=\frac94"),
    ("2.5 < x < 3.5", r"\frac52<x<\frac72"),
    ("e^0.5", r"\sqrt{e}"),
    (r"\sqrt0.5", r"\frac{\sqrt2}{2}"),
    ("2x+3", "y = 2x + 3"),
    ("10x - 14y + 8 = 0", "5x - 7y + 4 = 0"),
    ("(8, -2)", "(8,-2)"),
    ("(3, 4 ]", "(3,4]"),
    (r"\left(-\infty, 2\right) \cup (3,\infty)", r"(3, \infty) \cup (-\infty, 2)"),
    ("x > 2", r"(2,\infty)"),
    (r"-2 \le x \le 7", r"x \in [-2,7]"),
    (r"\{2, 1\}", r"\{1,2\}"),
    ("7, 5 and 3", "3, 5, 7"),
    ("1+2yx", "2xy+1"),
    ("ba + c", "c + ab"),
    ("BC + AB", "AB + BC"),
    (r"\frac{ab}{2}", r"\frac12 ba"),
    ("(1,2)", "1,2"),
    (r"\vec{b} + \vec{a}", r"\vec{a} + \vec{b}"),
    (r"1 + \sqrt{19}, 1 - \sqrt{19}", r"1 \pm \sqrt{19}"),
    (r"\begin{bmatrix} -\frac13 \\ 2 \end{bmatrix}", r"\begin{pmatrix} -1/3 \\ 2 \end{pmatrix}"),
]
ALGEBRA_AND_WRONG = [
    ("1.414214", r"\sqrt{2}"),
    ("1.4142135623730951", r"\sqrt{2}"),
    ("3.14159265358979", r"\pi"),
    ("x = 3.14159265358979", r"x = \pi"),
    ("x=-1.4142135623730951", r"x=-\sqrt{2}"),
    ("x=0.333333333333333", r"x=\frac{1}{3}"),
    ("0.785398163397448", r"\frac{\pi}{4}"),
    (r"\sqrt{2} + 10^{-16}", r"\sqrt{2}"),
    ("3.14", r"\pi"),
    (r"10^{-20} \pi", r"2 \cdot 10^{-20} \pi"),
    ("3m", "3"),
    ("3", "3m"),
    ("18 thousand", "18"),
    (r"18\text{ dozen}", "18"),
    ("18!", "18"),
    ("2 or 3", "3"),
    ("2, 3", "2"),
    ("1,2", "12"),
    ("1, 000", "1000"),
    ("1,2", "1.2"),
    ("(2,1)", "(1,2)"),
    ("(-2,1)", "1,-2"),
    ("2, 1", "(1,2)"),
    (r"\angle BAC", r"\angle ABC"),
    (r"\triangle ACB", r"\triangle ABC"),
    ("2BA+1", "2AB+1"),
    ("(y,x)", "(x,y)"),
    ("(1,2]", "(1,2)"),
    ("[1,2]", "(1,2)"),
    ("1 < x < 2", "(1,2)"),
    ("x=5", "y=5"),
    ("(x-1)^2", "x^2+2x+1"),
    ("6-9i", "6+9i"),
    ("I^2", "-1"),
    ("17 = 18", "18"),
    ("5x - 7y + 4 = 0", "0"),
    ("x = 9 + 8 = 18", "18"),
    ("r^2 - R^2", "R^2 - r^2"),
    ("0", "R^2 - r^2"),
    (r"-\infty", r"\infty"),
    (r"\frac{1}{0}", r"\frac{2}{0}"),
    (r"90^\circ", r"\frac{\pi}{2}"),
    (r"\begin{pmatrix} 1 & 2 \end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    (r"\begin{pmatrix} 2 \\ 1 \end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    (r"5x - 7y - 4 = 0", "5x - 7y + 4 = 0"),
    ("the answer is not 18", "18"),
    ("\x00", "18"),
    ("\ud800", "x"),
    ("((((", "18"),
    (r"\frac{}{}", "18"),
    ("🎲", "18"),
]


def _no_worker(self, answer, gold, *, timeout_s):
    raise AssertionError(f"{answer!r} and {gold!r} went to the worker")


@pytest.mark.parametrize(("answer", "gold"), EXACT_AND_RIGHT)
def test_the_same_number_unit_or_word_is_equivalent(answer, gold, monkeypatch):
    monkeypatch.setattr(MathWorker, "check", _no_worker)
    assert is_equivalent(answer, gold)


@pytest.mark.parametrize(("answer", "gold"), EXACT_AND_WRONG, ids=range(len(EXACT_AND_WRONG)))
def test_another_number_unit_or_word_is_not_equivalent(answer, gold, monkeypatch):
    monkeypatch.setattr(MathWorker, "check", _no_worker)
    assert not is_equivalent(answer, gold)


@pytest.mark.parametrize(("answer", "gold"), ALGEBRA_AND_RIGHT)
def test_the_same_expression_is_equivalent(answer, gold):
    assert is_equivalent(answer, gold)


@pytest.mark.parametrize(("answer", "gold"), ALGEBRA_AND_WRONG, ids=range(len(ALGEBRA_AND_WRONG)))
def test_another_expression_is_not_equivalent(answer, gold):
    assert not is_equivalent(answer, gold)


@pytest.mark.parametrize(
    "piece", ["$", "-$", "√", "²", "½", "=", "1e", "1,", " million", "{", "^", "(", r"\text{", r"\frac"]
)
def test_long_repeated_notation_is_wrong(piece, monkeypatch):
    monkeypatch.setattr(MathWorker, "check", lambda self, answer, gold, *, timeout_s: False)
    assert not is_equivalent(piece * (1900 // len(piece)) + "5", "18")


def test_an_endless_answer_is_wrong_and_the_next_one_is_graded():
    start = time.monotonic()
    assert not is_equivalent(TOWER, "18", timeout_s=0.3)
    assert is_equivalent(r"\sqrt{8}", r"2\sqrt2")
    assert time.monotonic() - start < 50


async def test_grading_works_concurrently_and_keeps_the_loop_running():
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.01)
            ticks += 1

    ticking = asyncio.create_task(tick())
    # Only the question that never ends is given up soon: the others must be answered on a busy machine, too.
    questions = [(TOWER, "18", 0.3), *((rf"{n}\sqrt2", r"\sqrt{8}", 30.0) for n in range(1, 5))]
    verdicts = await asyncio.gather(*(async_is_equivalent(a, g, timeout_s=limit) for a, g, limit in questions))
    ticking.cancel()
    assert verdicts == [False, False, True, False, False]
    assert ticks > 3, "the loop stood still"


# --- the worker itself, with a stand-in for math-verify -----------------------------------------------------

STAND_IN = """
import os, time

def LatexNormalizationConfig(**settings): pass
def LatexExtractionConfig(**settings): pass

def parse(text, *args, **settings):
    print("a library that talks")
    return text

def verify(gold, answer, **settings):
    if "hang" in answer: time.sleep(60)
    while "bomb" in answer: pass
    if "crash" in answer: os._exit(1)
    if "raise" in answer: raise RecursionError
    return "gold" in gold and "right" in answer.lower()  # an i is the imaginary unit by then
"""


@pytest.fixture
def worker(tmp_path, monkeypatch):
    (tmp_path / "math_verify.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(tmp_path)
    worker = MathWorker()
    yield worker
    worker.close()


def test_answer_and_reference_keep_their_order_and_printed_text_is_no_reply(worker):
    assert worker.check("right", "gold", timeout_s=60)
    assert not worker.check("gold", "right", timeout_s=60)


@pytest.mark.parametrize("answer", ["hang", "crash", "raise"])
def test_a_worker_that_breaks_says_no_and_is_replaced(worker, answer):
    start = time.monotonic()
    assert not worker.check(answer, "gold", timeout_s=0.2)
    assert worker.check("right", "gold", timeout_s=60)
    assert time.monotonic() - start < 50


def test_a_worker_that_died_between_questions_costs_no_verdict(worker):
    assert worker.check("right", "gold", timeout_s=60)
    (process,) = [one._process for one in worker._all if one._process is not None]
    process.kill()
    process.wait()
    assert worker.check("right", "gold", timeout_s=60)


def test_a_quick_answer_does_not_wait_for_slow_ones(worker):
    worker._quick_s, worker._max_wait_s = 0.1, 0.1
    with ThreadPoolExecutor(9) as pool:
        slow = [pool.submit(worker.check, f"bomb {n}", "gold", timeout_s=3) for n in range(8)]
        assert pool.submit(worker.check, "right", "gold", timeout_s=60).result()
        assert not all(check.done() for check in slow), "the first one still has its three seconds"
        assert not any(check.result() for check in slow)


def test_an_answer_that_took_too_long_is_not_asked_about_again(worker):
    worker._quick_s = 0.1
    assert not worker.check("bomb", "gold", timeout_s=0.3)
    asked = []
    for one in worker._all:
        one.ask = lambda question, **limits: asked.append(question)
    assert not worker.check("bomb", "gold", timeout_s=0.3) and not asked
    assert not worker.check("bomb", "gold two", timeout_s=0.3) and asked, "the reference may have been at fault"
    asked.clear()
    assert not worker.check("bomb", "gold three", timeout_s=0.3) and not asked, "two references were not"
    assert not worker.check("right", "gold", timeout_s=0.3) and asked


def test_questions_that_wait_too_long_for_the_slow_worker_are_wrong(worker):
    worker._quick_s, worker._max_wait_s = 0.05, 0.1
    with ThreadPoolExecutor(3) as pool:
        checks = [pool.submit(worker.check, f"bomb {n}", "gold", timeout_s=2.0) for n in range(3)]
        assert not any(check.result() for check in checks)
    assert sum(map(len, worker._endless.values())) == 1, "the others were not tried"


def test_waiting_for_other_questions_does_not_count_as_time(worker):
    with ThreadPoolExecutor(4) as pool:
        slow = [pool.submit(worker.check, "hang", "gold", timeout_s=1.5) for _ in range(2)]
        assert pool.submit(worker.check, "right", "gold", timeout_s=1.2).result()
        assert not any(check.result() for check in slow)


def test_without_math_verify_the_missing_extra_is_named(tmp_path, monkeypatch):
    (tmp_path / "math_verify.py").write_text("raise ImportError('no math_verify here')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MissingExtra, match=r"no math_verify here.*ludic-rl\[math\]"):
        MathWorker().check(r"\sqrt2", "2", timeout_s=60)


def test_a_forked_child_has_its_own_worker_and_none_outlives_its_process(tmp_path):
    (tmp_path / "math_verify.py").write_text(STAND_IN)
    script = r"""
        import os
        from ludic.envs.math_grading import is_equivalent
        from ludic.envs.math_worker import worker_of_this_process

        def grade():
            right = is_equivalent("right + 1", "gold + 1")
            (process,) = [one._process for one in worker_of_this_process()._all if one._process is not None]
            print(process.pid, right, flush=True)

        grade()
        if (pid := os.fork()):
            os.waitpid(pid, 0)
        grade()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    rows = [line.split() for line in done.stdout.splitlines()]
    assert [verdict for _, verdict in rows] == ["True"] * 3
    first, forked, again = (int(pid) for pid, _ in rows)
    assert first == again != forked
    for pid in (first, forked):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
