/** One position of speculative sampling: p the target's row, q the drafter's, both lists that sum to 1. No page in here. */

const sum = (row) => row.reduce((total, value) => total + value, 0);

/**
 * accepted: min(p, q) of each token; rejected: max(q - p, 0); shortfall: max(p - q, 0); residual: that, normalised, or null where
 * nothing is ever rejected (p = q); alpha: the chance of acceptance; variation: TV(p, q) = 1 - alpha.
 */
export function split(p, q) {
  const accepted = p.map((value, i) => Math.min(value, q[i]));
  const rejected = p.map((value, i) => Math.max(q[i] - value, 0));
  const shortfall = p.map((value, i) => Math.max(value - q[i], 0));
  const variation = sum(shortfall);
  const residual = variation > 1e-12 ? shortfall.map((value) => value / variation) : null;
  return { accepted, rejected, shortfall, residual, alpha: sum(accepted), variation };
}

/** The row with `value` (0 to 1) at i and the others scaled to fill the rest; equally, where they were all zero. */
export function withValue(row, i, value) {
  const set = Math.min(1, Math.max(0, value));
  const others = sum(row) - row[i];
  return row.map((old, j) => (j === i ? set : others > 1e-12 ? (old * (1 - set)) / others : (1 - set) / (row.length - 1)));
}

/** The row with `length` tokens: cut and normalised, or with zeros behind it; equal chances where nothing is left. */
export function resize(row, length) {
  const kept = Array.from({ length }, (_, i) => row[i] ?? 0);
  const total = sum(kept);
  return kept.map((value) => (total > 1e-12 ? value / total : 1 / length));
}

/** A token drawn from a row by inverse CDF; u in [0, 1). */
export function pick(row, u) {
  let below = 0;
  let last = 0;
  for (let i = 0; i < row.length; i += 1) {
    if (row[i] <= 0) continue;
    below += row[i];
    last = i;
    if (u < below) return i;
  }
  return last; // rounding left the sum below u
}

/** One step with one draft: {draft, u, accepted, token}. random() is uniform in [0, 1). */
export function draw(p, q, { residual }, random) {
  const draft = pick(q, random());
  const u = random();
  const accepted = u * q[draft] < p[draft] || residual === null;
  return { draft, u, accepted, token: accepted ? draft : pick(residual, random()) };
}

/** TV between the shares of `counts` and p, and what chance alone makes of it on average at this number of draws. */
export function distance(counts, p) {
  const n = sum(counts);
  const seen = sum(counts.map((count, i) => Math.abs(count / n - p[i]))) / 2;
  const chance = sum(p.map((value) => Math.sqrt((2 * value * (1 - value)) / (Math.PI * n)))) / 2;
  return { n, seen, chance };
}
