"""A verifier as a program, for `truedraw audit process 'python examples/verifier.py'`: JSON lines in and out."""

import json
import sys


def first_above(weights, u):
    """The first token whose cumulated weight exceeds u times the total."""
    goal, below = u * sum(weights), 0.0
    for token, weight in enumerate(weights):
        below += weight
        if weight > 0 and below > goal:
            return token
    return max(token for token, weight in enumerate(weights) if weight > 0)


def checked(rows):
    rows = [[float(mass) for mass in row] for row in rows]
    for row in rows:
        if not (all(mass >= 0 for mass in row) and abs(sum(row) - 1) < 1e-3):
            raise ValueError("a row is no law: finite numbers >= 0 that sum to 1 are needed")
    return rows


def verify(p, q, drafts, uniforms):
    p, q = checked(p), None if q is None else checked(q)
    vocab = len(p[0])
    for i, x in enumerate(drafts):
        row = q[i] + [0.0] * vocab if q is not None else [float(token == x) for token in range(vocab)]
        mass, drawn = (p[i][x], row[x]) if 0 <= x < vocab else (0.0, 1.0)
        if not uniforms[i] * drawn < mass:
            left = [max(target - draft, 0.0) for target, draft in zip(p[i], row, strict=False)]
            return i, first_above(left if any(left) else p[i], uniforms[-1])
    return len(drafts), first_above(p[-1], uniforms[-1])


print(json.dumps({"protocol": 1, "name": "example in Python", "uniforms": True}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    try:
        accepted, token = verify(request["p"], request["q"], request["drafts"], request["uniforms"])
        answer = {"accepted": accepted, "token": token}
    except ValueError as error:
        answer = {"error": str(error)}
    print(json.dumps({"id": request["id"], **answer}), flush=True)
