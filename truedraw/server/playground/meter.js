/** Counts of one answer while it comes: speeds, tokens per step, acceptance by depth. No page in here. */

const WINDOW = 1; // seconds of decoding that "now" looks back

export class Meter {
  constructor() {
    this.steps = [];
    this.summary = null;
  }

  add(step) {
    this.steps.push(step);
  }

  /**
   * {speed, plain, ratio}: tokens per second over the last second of decoding, or over all of it; null where unknown.
   * plain and ratio come from the server's estimate of what the same tokens would have cost without drafts.
   */
  speeds({ now }) {
    let tokens = 0;
    let seconds = 0;
    let estimate = 0;
    for (let i = this.steps.length - 1; i >= 0 && !(now && seconds >= WINDOW); i -= 1) {
      tokens += this.steps[i].emitted;
      seconds += this.steps[i].seconds;
      estimate += this.steps[i].estimated_plain_seconds ?? NaN;
    }
    const over = (dividend, divisor) => (divisor > 0 && Number.isFinite(dividend) ? dividend / divisor : null);
    return { speed: over(tokens, seconds), plain: over(tokens, estimate), ratio: over(estimate, seconds) };
  }

  get tokens() {
    return this.steps.reduce((sum, step) => sum + step.emitted, 0);
  }

  get proposed() {
    return this.summary?.proposed ?? this.steps.reduce((sum, step) => sum + step.proposed, 0);
  }

  get accepted() {
    return this.summary?.accepted ?? this.steps.reduce((sum, step) => sum + step.accepted, 0);
  }

  get tokensPerStep() {
    return this.summary?.tokens_per_step ?? (this.steps.length ? this.tokens / this.steps.length : null);
  }

  /** Of the drafts that reached a depth, the share that was accepted there. */
  get acceptanceByDepth() {
    if (this.summary) return this.summary.acceptance_by_depth;
    const deepest = Math.max(0, ...this.steps.map((step) => step.proposed));
    return Array.from({ length: deepest }, (_, depth) => {
      const reached = this.steps.filter((step) => step.proposed > depth);
      return reached.filter((step) => step.accepted > depth).length / reached.length;
    });
  }
}
