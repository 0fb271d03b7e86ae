"""The mathematics again, in the slowest and plainest way: Python floats (float64), one token after the other, no tensors.

Written from the papers' formulas, not from elasticrl/ppo, whose results it judges. `None` stands for a masked position.
"""

from math import exp, log, sqrt


def valid(row, mask):
    return [x for x, keep in zip(row, mask, strict=True) if keep]


def spread(short, mask):
    """Puts a response's values back to where its tokens stand."""
    it = iter(short)
    return [next(it) if keep else 0.0 for keep in mask]


def gae_row(rewards, values, mask, gamma, lam):
    r, v = valid(rewards, mask), valid(values, mask)
    deltas = [r[t] + gamma * (v[t + 1] if t + 1 < len(v) else 0.0) - v[t] for t in range(len(v))]
    # The definition, a sum over what is to come, not the recursion.
    adv = [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, len(v))) for t in range(len(v))]
    return spread(adv, mask), spread([a + b for a, b in zip(adv, v, strict=True)], mask)


def rewards_row(score, mask, kl, coef):
    row = [-coef * k if keep else 0.0 for k, keep in zip(kl, mask, strict=True)]
    places = [i for i, keep in enumerate(mask) if keep]
    if places:
        row[places[-1]] += score
    return row


def whiten_all(rows, masks):
    flat = [x for row, mask in zip(rows, masks, strict=True) for x in valid(row, mask)]
    if len(flat) < 2:
        return rows
    mean = sum(flat) / len(flat)
    var = sum((x - mean) ** 2 for x in flat) / (len(flat) - 1)
    return [
        [(x - mean) / sqrt(var + 1e-8) if keep else 0.0 for x, keep in zip(row, mask, strict=True)]
        for row, mask in zip(rows, masks, strict=True)
    ]


def clamp(x, lo, hi):
    return min(max(x, lo), hi)


def policy(new, old, adv, mask, *, low, high, dual, limit, weights):
    """(loss, clipped, approximate KL, tokens), summed over all rows."""
    loss = clipped = kl = 0.0
    tokens = 0
    for row in range(len(mask)):
        for t in range(len(mask[row])):
            if not mask[row][t]:
                continue
            tokens += 1
            d = clamp(new[row][t] - old[row][t], -limit, limit)
            a, ratio = adv[row][t], exp(d)
            term = max(-a * ratio, -a * clamp(ratio, 1 - low, 1 + high))
            clipped += -a * clamp(ratio, 1 - low, 1 + high) > -a * ratio
            if dual is not None and a < 0:
                term = min(term, -a * dual)
            loss += term * (weights[row][t] if weights is not None else 1.0)
            kl += ratio - 1 - d
    return loss, clipped, kl, tokens


def value(new, old, returns, mask, clip):
    loss, tokens = 0.0, 0
    for n_row, o_row, r_row, m_row in zip(new, old, returns, mask, strict=True):
        for n, o, r, keep in zip(n_row, o_row, r_row, m_row, strict=True):
            if keep:
                tokens += 1
                plain = (n - r) ** 2
                near = (clamp(n, o - clip, o + clip) - r) ** 2 if clip is not None else plain
                loss += 0.5 * max(plain, near)
    return loss, tokens


def importance(trainer, rollout, mask, limit):
    return [
        [min(exp(clamp(a - b, -20, 20)), limit) if keep else 1.0 for a, b, keep in zip(*rows, strict=True)]
        for rows in zip(trainer, rollout, mask, strict=True)
    ]


def k3(policy_lp, ref_lp, limit):
    d = clamp(ref_lp - policy_lp, -20, 20)
    return min(exp(d) - 1 - d, limit)


def log_softmax(logits):
    top = max(logits)
    total = log(sum(exp(x - top) for x in logits)) + top
    return [x - total for x in logits]


def entropy(logits):
    return -sum(exp(x) * x for x in log_softmax(logits))


def group_row(scores, group):
    found = []
    for start in range(0, len(scores), group):
        part = scores[start : start + group]
        mean = sum(part) / group
        sd = sqrt(sum((x - mean) ** 2 for x in part) / (group - 1)) if group > 1 else 0.0
        found += [(x - mean) / (sd + 1e-4) if group > 1 else x - mean for x in part]
    return found


def sigmoid(x):
    return 1 / (1 + exp(-x)) if x >= 0 else exp(x) / (1 + exp(x))


def dpo(chosen, rejected, keep, beta):
    return sum(-log(sigmoid(beta * (c - r))) for c, r, k in zip(chosen, rejected, keep, strict=True) if k)


def kto(ratios, good, keep, baseline, beta):
    return sum(
        1 - sigmoid((beta if g else -beta) * (r - baseline)) for r, g, k in zip(ratios, good, keep, strict=True) if k
    )
