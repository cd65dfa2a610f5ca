// The data, and how elements are made. Text becomes text nodes, never markup: that is the only way in.

const data = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";

function fill(node, options, children) {
  for (const [name, value] of Object.entries(options || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "paint") node.style.backgroundColor = value;
    else if (name === "value") node.value = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(2)) {
    if (child !== undefined && child !== null && child !== false) node.append(child);
  }
  return node;
}

function el(tag, options, ...children) {
  return fill(document.createElement(tag), options, children);
}

function svg(tag, options, ...children) {
  return fill(document.createElementNS(SVG, tag), options, children);
}

// Characters that are invisible, or that steer how others are shown, are spelt out.
const INVISIBLE = new RegExp(
  "[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u00ad\\u034f\\u061c\\u115f\\u1160\\u17b4\\u17b5\\u180e" +
  "\\u200b-\\u200f\\u2028-\\u202e\\u2060-\\u206f\\u3164\\ufe00-\\ufe0f\\ufeff\\uffa0\\ufff9-\\ufffc]" +
  "|[\\ud800-\\udbff](?![\\udc00-\\udfff])|(?<![\\ud800-\\udbff])[\\udc00-\\udfff]|\\udb40[\\udc00-\\udfff]", "g");

function visible(text) {
  const parts = [];
  let end = 0;
  for (const found of text.matchAll(INVISIBLE)) {
    if (found.index > end) parts.push(text.slice(end, found.index));
    const code = found[0].codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
    parts.push(el("span", { class: "control", title: "a character that is not shown as it is" }, code));
    end = found.index + found[0].length;
  }
  if (end < text.length) parts.push(text.slice(end));
  return parts;
}

function shorten(text, most) {
  return text.length > most ? text.slice(0, most) + "…" : text;
}

function format(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  let shown;
  if (Number.isInteger(value) && size < 1e7) shown = value.toLocaleString("en-US");
  else if (size >= 1e5 || size < 1e-3) shown = Number(value.toPrecision(3)).toExponential().replace("e+", "e");
  else if (size >= 1000) shown = value.toLocaleString("en-US", { maximumFractionDigits: 0 });
  else shown = String(Number(value.toPrecision(4)));
  return shown.replaceAll("-", "−");
}

// As many digits as a 32-bit number has: two logprobs that nearly agree are to be told apart.
function exact(value) {
  return value === null || value === undefined ? "not finite" : String(Number(value.toPrecision(7))).replaceAll("-", "−");
}

function gapText(gap) {
  return gap >= 1e9 ? "not finite" : format(gap);
}

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 1) return `${format(Math.round(seconds * 1e4) / 10)} ms`;
  if (seconds < 90) return `${seconds.toFixed(1)} s`;
  if (seconds < 5400) return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
  return `${Math.floor(seconds / 3600)} h ${Math.round((seconds % 3600) / 60)} min`;
}

function moment(time) {
  return time === null || time === undefined ? "–" : new Date(time * 1000).toLocaleString();
}

const tip = el("div", { id: "tip", role: "tooltip", hidden: true });
document.body.append(tip);

function showTip(x, y, head, rows) {
  tip.replaceChildren(el("div", { class: "head" }, head),
    el("table", null, el("tbody", null, rows.map((row) => el("tr", null, row.map((cell) => el("td", null, cell)))))));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = x + 16 + box.width > innerWidth ? x - 16 - box.width : x + 16;
  const top = y + 18 + box.height > innerHeight ? y - 14 - box.height : y + 18;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, top)}px`;
}

function hideTip() {
  tip.hidden = true;
}

function choice(label, options, chosen, change) {
  const select = el("select", { onchange: (event) => change(event.target.value), "aria-label": label },
    options.map(([value, text]) => el("option", { value, selected: String(value) === String(chosen) }, text)));
  return el("label", null, label, select);
}

function swatch(colour, text) {
  return el("span", { class: "key" }, el("i", { paint: colour }), text);
}

// Calls once the element comes into sight: hundreds of charts cost nothing until they are looked at.
const waiting = new WeakMap();
const sight = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (!entry.isIntersecting) continue;
    sight.unobserve(entry.target);
    waiting.get(entry.target)();
  }
}, { rootMargin: "300px" });

function whenSeen(node, draw) {
  waiting.set(node, draw);
  sight.observe(node);
  return node;
}
