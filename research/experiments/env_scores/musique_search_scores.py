"""Reference scores of docs/envs/musique_search.md: the oracle, and what BM25 finds; the argument is a JSONL file of MuSiQue."""

import json
import sys
from pathlib import Path
from statistics import fmean

from ludic_envs.musique_search import MuSiQueSearchEnv
from ludic_envs.search import DocumentSearch

rows = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
rewards, searches = [], []
for row in rows:
    env = MuSiQueSearchEnv(row)
    env.reset(seed=0)
    for query in env.reference_queries():
        env.search(query)
    outcome = env.step({"agent_0": env.reference_action("agent_0")})["agent_0"]
    rewards.append(outcome.reward)
    searches.append(outcome.info["num_searches"])
print(f"oracle {fmean(rewards):.3f}, {sum(r == 1 for r in rewards)} of {len(rewards)}, {fmean(searches):.2f} searches")
for k in (1, 2, 3, 5):
    found, whole, at_once = [], [], []
    for row in rows:
        env = MuSiQueSearchEnv(row)
        index = DocumentSearch([str(p) for p in env.sample.paragraphs])
        needed = {n for n, p in enumerate(env.sample.paragraphs) if p.is_supporting}
        queries = env.reference_queries()
        seen = {n for query in queries for n in index.top(query, k)}
        found.append(len(needed & seen) / len(needed))
        whole.append(needed <= seen)
        at_once.append(len(needed & set(index.top(row["question"], k * len(queries)))) / len(needed))
    print(f"k={k} found {fmean(found):.1%} all {fmean(whole):.1%} at once {fmean(at_once):.1%}")
