"""Statistics that every policy-gradient loss reports."""

from ludic.training.losses.tokens import ActionTokens, Stats, over_items, over_tokens


def common_stats(tokens: ActionTokens) -> Stats:
    weights_B = tokens.item_weights
    return {
        "adv_mean": over_items(weights_B),
        "adv_abs_mean": over_items(weights_B.abs()),
        "logp_mean": over_tokens(tokens.logps),
        "avg_action_tokens": (tokens.logps.new_full((), tokens.logps.shape[0]), float(tokens.num_items)),
    }
