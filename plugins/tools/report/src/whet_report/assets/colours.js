// What colours mean. Scales mix a colour into nothing, so text on them stays legible on light and dark pages alike.

const PALETTE = ["var(--c0)", "var(--c1)", "var(--c2)", "var(--c3)", "var(--c4)", "var(--c5)", "var(--c6)", "var(--c7)"];
const REST = "var(--c8)";

function colourOf(index) {
  return PALETTE[index % PALETTE.length];
}

function tint(colour, share) {
  const percent = Math.round(100 * Math.max(0, Math.min(1, share)) * 0.72);
  return percent ? `color-mix(in oklab, ${colour} ${percent}%, transparent)` : "transparent";
}

// A scale: `paint(value)` gives a colour, `ticks` is what the legend says at both ends, and of the scale.
function sequential(colour, from, to, ticks) {
  return { paint: (value) => tint(colour, (value - from) / (to - from || 1)), from, to, ticks };
}

function diverging(most, ticks) {
  const paint = (value) => tint(value < 0 ? "var(--low)" : "var(--high)", Math.abs(value) / (most || 1));
  return { paint, from: -most, to: most, ticks };
}

const GAP_FROM = -6, GAP_TO = 0;  // powers of ten, in nats

function gapScale() {
  const ticks = ["1e−6", "1 nat", "log scale"];
  const scale = sequential("var(--scale)", GAP_FROM, GAP_TO, ticks);
  return { ...scale, of: (gap) => Math.log10(Math.max(gap, 1e-30)) };
}

function legend(scale) {
  const cells = Array.from({ length: 20 }, (_, i) => scale.from + (scale.to - scale.from) * (i / 19));
  const [from, to, note] = scale.ticks;
  return el("span", { class: "legend" }, el("span", null, from),
    el("span", { class: "ramp" }, cells.map((value) => el("i", { paint: scale.paint(value) }))),
    el("span", null, to), note && el("span", null, note));
}
