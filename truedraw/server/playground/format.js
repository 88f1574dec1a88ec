/** Numbers and tokens as a reader wants them. */

/** A probability: four decimals, small ones as 3.2e-6, certain ones as 1. */
export function probability(value) {
  if (value === 0 || value === 1) return String(value);
  if (value < 0.0005) return value.toExponential(1);
  return value > 0.99995 ? "> 0.9999" : value.toFixed(4);
}

export const percent = (value) => `${(100 * value).toFixed(value > 0 && value < 0.0995 ? 1 : 0)} %`;

export const speed = (perSecond) => `${perSecond < 99.5 ? perSecond.toFixed(1) : Math.round(perSecond).toLocaleString("en")} tok/s`;

export const ratio = (value) => `${value.toFixed(2)}×`;

export const count = (value) => value.toLocaleString("en");

export const plural = (value, word) => `${count(value)} ${word}${value === 1 ? "" : "s"}`;

/** Whitespace and control characters made visible; a token without text is named by its bytes. */
export function visible(text, bytes = []) {
  if (text === "") return bytes.length ? bytes.map((byte) => byte.toString(16).padStart(2, "0")).join(" ") : "(no text)";
  return text
    .replaceAll(" ", "␣")
    .replaceAll("\n", "⏎")
    .replaceAll("\t", "⇥")
    .replace(/[\u0000-\u001f\u007f]/g, (sign) => `\\x${sign.charCodeAt(0).toString(16).padStart(2, "0")}`);
}

export const ORIGINS = {
  draft: "A draft the target accepted.",
  residual: "The target's own token, after a draft was rejected.",
  bonus: "The target's own token, after every draft was accepted.",
  plain: "The target's own token; the step drafted nothing.",
};
