// Which view is shown: the part of the address behind the #.

const VIEWS = { overview: ["Overview", overview], metrics: ["Metrics", metricsView], time: ["Time", timeView],
  rollouts: ["Rollouts", rolloutsView], gaps: ["Gaps", gapsView], run: ["Run", runView] };

function current() {
  const name = location.hash.slice(1);
  return Object.hasOwn(VIEWS, name) ? name : "overview";
}

function show() {
  hideTip();
  const name = current();
  document.getElementById("top").replaceChildren(
    el("span", { class: "name" }, visible(data.run.name)), el("span", { class: `pill ${data.run.state}` }, data.run.state === "open" ? "open" : data.run.state),
    el("nav", { "aria-label": "views" }, Object.entries(VIEWS).map(([key, [label]]) => el("a", { href: `#${key}`, "aria-current": key === name && "page" }, label))),
    el("button", { "aria-label": "light or dark", onclick: theme }, "◐"));
  document.getElementById("view").replaceChildren(...VIEWS[name][1]().flat(2).filter(Boolean));
}

function theme() {
  const dark = getComputedStyle(document.documentElement).colorScheme === "dark"
    || (!document.documentElement.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
  document.documentElement.dataset.theme = dark ? "light" : "dark";
}

document.title = `${data.run.name} – whet report`;
addEventListener("hashchange", () => { show(); if (current() !== "rollouts" || browse.token === null) scrollTo(0, 0); });
show();
