// Formulas. Temml makes MathML of TeX, which browsers draw by themselves; it is loaded with the first formula.

import { make } from "./dom.js";

const LIMITS = { throwOnError: true, maxExpand: 200, maxSize: [20, 20] };

async function draw(node, text, isDisplay) {
  const { default: temml } = await import("./temml.esm.js");
  const drawn = make("span", isDisplay ? "math display" : "math");
  drawn.title = text;
  temml.render(text, drawn, { ...LIMITS, displayMode: isDisplay });
  node.replaceWith(drawn);
}

// Shows the TeX until the formula is drawn; if it cannot be drawn, the TeX stays.
export function formula(text, isDisplay) {
  const node = make("code", "math", text);
  draw(node, text, isDisplay).catch(() => (node.title = "this formula cannot be drawn"));
  return node;
}
