import pytest

from ludic.envs.code_exec import ExactMatchVerifier, FloatTolerantVerifier, WhitespaceNormalizedVerifier


@pytest.mark.parametrize(
    ("verifier", "actual", "expected", "passes"),
    [
        (ExactMatchVerifier(), "4\n", "4", True),
        (ExactMatchVerifier(), "4 \n5", "4\n5", False),  # inside it counts
        (ExactMatchVerifier(strip=False), "4\n", "4", False),
        (ExactMatchVerifier(), "Yes", "yes", False),
        (ExactMatchVerifier(case_sensitive=False), "YES", "yes", True),
        (WhitespaceNormalizedVerifier(), "1  2\n\n3 ", "1 2 3\n", True),
        (WhitespaceNormalizedVerifier(), "12 3", "1 2 3", False),
        (WhitespaceNormalizedVerifier(), "", "0", False),
        (FloatTolerantVerifier(), "0.30000000000000004 ok", "0.3 ok", True),
        (FloatTolerantVerifier(), "0.31", "0.3", False),
        (FloatTolerantVerifier(abs_tol=0.1), "0.31", "0.3", True),
        (FloatTolerantVerifier(rel_tol=1e-3), "1000.5", "1000", True),
        (FloatTolerantVerifier(), "nan", "1", False),
        (FloatTolerantVerifier(), "inf", "1e308", False),
        (FloatTolerantVerifier(), "one", "1", False),
        (FloatTolerantVerifier(), "1 2", "1", False),
    ],
)
def test_output_is_compared_as_the_verifier_says(verifier, actual, expected, passes):
    verdict = verifier.verify(actual, expected)
    assert verdict.passed is passes and (verdict.details is None) is passes


@pytest.mark.parametrize(
    ("verifier", "actual", "expected", "details"),
    [
        (ExactMatchVerifier(), "1\n5", "1\n2", "Line 2 is '5', '2' is expected."),
        (ExactMatchVerifier(), "1", "1\n2", "The output has 1 lines, 2 are expected."),
        (WhitespaceNormalizedVerifier(), "a b", "a c", "Word 2 is 'b', 'c' is expected."),
        (FloatTolerantVerifier(), "1", "1 2", "The output has 1 words, 2 are expected."),
    ],
)
def test_a_wrong_output_is_told_where_it_first_differs(verifier, actual, expected, details):
    assert verifier.verify(actual, expected).details == details
