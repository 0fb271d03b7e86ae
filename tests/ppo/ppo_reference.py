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


def policy(
    new,
    old,
    adv,
    mask,
    *,
    low=0.2,
    high=0.2,
    dual=None,
    limit=20.0,
    weights=None,
    mode="vanilla",
    taus=(1.0, 1.05),
    how="token-mean",
):
    """(loss, clipped, approximate KL), summed over all rows; the loss as `how` adds up."""
    loss = clipped = kl = 0.0
    for row in range(len(mask)):
        places = [t for t in range(len(mask[row])) if mask[row][t]]
        logs = {t: clamp(new[row][t] - old[row][t], -limit, limit) for t in places}
        terms = []
        for t in places:
            a, d, w = adv[row][t], logs[t], weights[row][t] if weights is not None else 1.0
            kl += exp(d) - 1 - d
            ratio = exp(sum(logs.values()) / len(logs)) if mode == "gspo" else exp(d)
            if mode == "geo_mean":
                best = {i: (max if adv[row][i] < 0 else min)(x, clamp(x, -low, high)) for i, x in logs.items()}
                clipped += best[t] != d
                terms.append(-a * exp(sum(best.values()) / len(best)) * w)
                continue
            held = clamp(ratio, 1 - low, 1 + high)
            if mode == "cispo":
                term, bites = -held * a * new[row][t], held != ratio
            elif mode == "sapo":
                tau = taus[0] if a > 0 else taus[1]
                term, bites = -a * 4 / tau * sigmoid(tau * (ratio - 1)), False
            else:
                term, bites = max(-a * ratio, -a * held), -a * held > -a * ratio
                term = min(term, -a * dual) if dual is not None and a < 0 else term
            clipped += bites
            terms.append(term * w)
        loss += sum(terms) / (max(len(terms), 1) if how == "seq-mean-token-mean" else 1)
    return loss, clipped, kl


def count(entries, how, most):
    """What `how` divides by, of (tokens, samples)."""
    tokens, samples = (max(float(x), 1.0) for x in entries)
    return {"token-mean": tokens, "seq-mean-token-sum-norm": samples * most}.get(how, samples)


def added(rows, mask, how):
    """What `how` adds up."""
    each = [valid(row, keep) for row, keep in zip(rows, mask, strict=True)]
    return sum(sum(row) / (max(len(row), 1) if how == "seq-mean-token-mean" else 1) for row in each)


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


def importance(trainer, rollout, mask, limit, floor=0.0, mode="token_truncate"):
    level, _, how = mode.partition("_")
    found = []
    for rows in zip(trainer, rollout, mask, strict=True):
        logs = [a - b if keep else 0.0 for a, b, keep in zip(*rows, strict=True)]
        if level == "sequence":
            logs = [sum(logs)] * len(logs)
        ratios = [exp(clamp(log, -20, 20)) for log in logs]
        if how == "truncate":
            bounded = [clamp(ratio, floor, limit) for ratio in ratios]
        else:
            bounded = [ratio if floor <= ratio <= limit else 0.0 for ratio in ratios]
        found.append([ratio if keep else 1.0 for ratio, keep in zip(bounded, rows[2], strict=True)])
    return found


def k3(policy_lp, ref_lp, limit):
    d = clamp(ref_lp - policy_lp, -20, 20)
    return min(exp(d) - 1 - d, limit)


def divergence(kind, policy_lp, ref_lp, limit):
    d = policy_lp - ref_lp
    return {"k1": d, "k2": d * d / 2, "k3": k3(policy_lp, ref_lp, limit)}[kind.removesuffix("+")]


def divergence_slope(kind, policy_lp, ref_lp, limit):
    """By policy_lp."""
    d = policy_lp - ref_lp
    if kind == "k3":
        return 1 - exp(-d) if abs(d) < 20 and k3(policy_lp, ref_lp, limit) < limit else 0.0
    return 1.0 if kind == "k1" else d


def log_softmax(logits):
    top = max(logits)
    total = log(sum(exp(x - top) for x in logits)) + top
    return [x - total for x in logits]


def entropy(logits):
    return -sum(exp(x) * x for x in log_softmax(logits))


def group_row(scores, group, by="group"):
    found = []
    for start in range(0, len(scores), group):
        part = scores[start : start + group]
        mean = sum(part) / group
        sd = deviation(part if by == "group" else scores) + 1e-4
        found += [(x - mean) / sd if group > 1 and by != "none" else x - mean for x in part]
    return found


def deviation(values):
    mean = sum(values) / len(values)
    return sqrt(sum((x - mean) ** 2 for x in values) / (len(values) - 1)) if len(values) > 1 else 0.0


def others_row(scores, group):
    """RLOO: each score less the mean of the others of its group."""
    parts = [scores[start : start + group] for start in range(0, len(scores), group)]
    return [x - sum(part[:i] + part[i + 1 :]) / (group - 1) for part in parts for i, x in enumerate(part)]


def opo_row(scores, lengths, group):
    """OPO: each score less the group's mean by lengths."""
    found = []
    for start in range(0, len(scores), group):
        part = list(zip(scores[start : start + group], lengths[start : start + group], strict=True))
        mean = sum(x * n for x, n in part) / max(sum(n for _, n in part), 1)
        found += [x - mean for x, _ in part]
    return found


def overlong(length, most, buffer, factor):
    return -min(-(length - (most - buffer)) / buffer * factor, 0)


def sigmoid(x):
    return 1 / (1 + exp(-x)) if x >= 0 else exp(x) / (1 + exp(x))


def dpo(chosen, rejected, keep, beta, kind="sigmoid", gamma=0.0, lengths=None):
    total = 0.0
    for i in (i for i, k in enumerate(keep) if k):
        c, r = chosen[i], rejected[i]
        if kind in ("ipo", "simpo"):
            c, r = c / max(lengths[0][i], 1), r / max(lengths[1][i], 1)
        total += {
            "sigmoid": lambda m: -log(sigmoid(beta * m)),
            "hinge": lambda m: max(0.0, 1 - beta * m),
            "ipo": lambda m: (m - 1 / (2 * beta)) ** 2,
            "simpo": lambda m: -log(sigmoid(beta * m - gamma)),
        }[kind](c - r)  # fmt: skip
    return total


def kto(ratios, good, keep, baseline, beta, weights=(1.0, 1.0)):
    return sum(
        (weights[0] if g else weights[1]) * (1 - sigmoid((beta if g else -beta) * (r - baseline)))
        for r, g, k in zip(ratios, good, keep, strict=True) if k
    )  # fmt: skip
