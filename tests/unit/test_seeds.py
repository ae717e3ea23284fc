"""The numbers of random streams: runs that are resumed or replayed depend on them."""

from ludic import seeds


def test_the_numbers_never_change():
    tables = {kind: {each.name: int(each) for each in getattr(seeds, kind)} for kind in dir(seeds) if "Seeds" in kind}
    assert tables == {
        "BatchSeeds": {"EVAL_ENV": 101, "EVAL_SAMPLING": 102, "TASKS": 103, "ENVS": 104, "RECORDED": 105, "HELD_OUT": 106, "REPLAY": 107},
        "CallSeeds": {"SUMMARY": 0x5EED, "CHILD": 0x0C41D},
        "EpisodeSeeds": {"ENV": 0, "SAMPLING": 1},
        "FileSeeds": {"ORDER": 0, "WITHIN_CHUNK": 1},
        "RoleSeeds": {"ASSIGNMENT": 0, "VERSION": 1, "CHANGED": 2},
    }  # fmt: skip
