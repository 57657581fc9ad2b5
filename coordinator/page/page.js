// The fleet's page. Everything that devices name is put in as text, never as markup.

const TABS = [["fleet", "Fleet"], ["clusters", "Clusters"], ["rounds", "Rounds"], ["accuracy", "Accuracy"], ["samples", "Samples"], ["rollouts", "Rollouts"], ["events", "Events"]];
const UNTOLD = "not told by its owner";
const MAX_EVENTS = 300;
let state = null;       // /api/state
let session = { may_act: false, csrf: "", login: false };
let detail = null;      // of the device or round that is looked at
let events = [];
let drafts = {};        // what was typed into fields, which are made anew with each refresh
let shown = { search: "", only: "all" };

const $ = (id) => document.getElementById(id);

function h(tag, attributes = {}, ...children) {
  const svg = ["svg", "g", "path", "circle", "line", "text", "rect", "title"].includes(tag);
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "style") Object.assign(element.style, value);  // by the object model: the page's policy forbids the attribute
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(9)) if (child !== null && child !== undefined && child !== false) element.append(child);
  return element;
}

// ------------------------------------------------------------------------------------------------------------ words

const number = (x, digits = 0) => x === null || x === undefined ? "–" : x.toLocaleString("en", { maximumFractionDigits: digits });
const percent = (x) => x === null || x === undefined ? "–" : `${(100 * x).toFixed(1)} %`;
const bytes = (x) => x == null ? "–" : x < 1000 ? `${x} B` : x >= 1e9 ? `${(x / 1e9).toFixed(2)} GB` : x >= 1e6 ? `${(x / 1e6).toFixed(2)} MB` : `${(x / 1e3).toFixed(1)} kB`;
function span(s) {
  if (s === null || s === undefined) return "–";
  if (s < 0) s = 0;
  if (s < 90) return `${Math.round(s)} s`;
  if (s < 5400) return `${Math.round(s / 60)} min`;
  return s < 172800 ? `${Math.round(s / 3600)} h` : `${Math.round(s / 86400)} days`;
}
const took = (s) => s !== null && s !== undefined && s < 10 ? `${number(s, 1)} s` : span(s);
const capital = (text) => text[0].toUpperCase() + text.slice(1);
const count = (n, word) => `${number(n)} ${word}${n === 1 ? "" : "s"}`;
const byName = new Intl.Collator("en", { numeric: true }).compare;
const ago = (at) => at ? `${span(Date.now() / 1000 - at)} ago` : "–";
const clock = (at) => at ? new Date(at * 1000).toLocaleString([], { dateStyle: "short", timeStyle: "medium" }) : "–";
const color = (name) => { const k = state.clusters.findIndex((c) => c.name === name); return `var(--cluster-${Math.max(k, 0) % 8})`; };
const KIND = { online: "good", answered: "good", sleeping: "warn", declined: "warn", unsupported: "warn", late: "warn", expired: "warn",
  running: "good", done: "good", serving: "good", paused: "warn", fetching: "warn", trial: "warn", aborted: "bad", refused: "bad", rolled_back: "bad", drift: "bad",
  offline: "bad", failed: "bad", rejected: "bad", "in quarantine": "bad", retired: "bad" };
const pill = (word) => h("span", { class: `pill ${KIND[word] ?? ""}` }, word.replaceAll("_", " "));
const link = (id) => h("a", { href: `#device/${encodeURIComponent(id)}`, "data-key": `d:${id}` }, id);

// ------------------------------------------------------------------------------------------------------------ parts

const section = (title, hint, ...children) => h("section", {}, h("h2", {}, title), hint && h("p", { class: "hint" }, hint), ...children);

function table(columns, rows) {
  if (!rows.length) return h("p", { class: "hint" }, "Nothing yet.");
  const cells = (row) => columns.map(([name, of, kind]) => {
    const told = of(row);
    return h("td", { class: kind, "data-label": name, "data-empty": told === "" || told === "–" }, told);
  });
  return h("div", { class: "scroll" }, h("table", { class: "cards" },
    h("thead", {}, h("tr", {}, columns.map(([name, , kind]) => h("th", { scope: "col", class: kind === "n" ? "n" : null }, name)))),
    h("tbody", {}, rows.map((row) => h("tr", {}, cells(row))))));
}

function tiles(pairs) {
  return h("div", { class: "tiles" }, pairs.map(([name, value]) => h("div", {}, h("strong", {}, value), h("span", {}, name))));
}

function spark(points) {
  if (points.length < 2) return h("span", { class: "hint" }, points.length ? "" : "–");
  const [first, last] = [points[0][0], points.at(-1)[0]];
  const at = ([r, a]) => `${(2 + 116 * (r - first) / Math.max(last - first, 1)).toFixed(1)},${(28 - 26 * a).toFixed(1)}`;
  return h("svg", { class: "spark", viewBox: "0 0 120 30", role: "img", "aria-label": `from ${percent(points[0][1])} to ${percent(points.at(-1)[1])}` },
    h("path", { d: `M${points.map(at).join("L")}` }));
}

function lines(series, label) {  // [[round, share], …] each
  const [w, hgt, left, low] = [720, 240, 48, 210];
  const rounds = series.flatMap((s) => s.points.map((p) => p[0]));
  if (!rounds.length) return h("p", { class: "hint" }, "Nothing has been measured yet.");
  const [a, b] = [Math.min(...rounds), Math.max(...rounds)];
  const x = (r) => left + (w - left - 10) * (r - a) / Math.max(b - a, 1);
  const y = (v) => low - (low - 12) * v;
  return h("svg", { viewBox: `0 0 ${w} ${hgt}`, role: "img", "aria-label": label },
    h("g", { class: "grid" }, [0, 0.25, 0.5, 0.75, 1].map((v) => [h("line", { x1: left, x2: w - 10, y1: y(v), y2: y(v) }),
      h("text", { x: left - 6, y: y(v) + 4, "text-anchor": "end" }, `${100 * v} %`)])),
    [a, b].map((r, k) => (k === 0 || b > a) && h("text", { x: x(r), y: low + 18, "text-anchor": k ? "end" : "start" }, `round ${r}`)),
    series.map((s) => h("path", { d: `M${s.points.map(([r, v]) => `${x(r).toFixed(1)},${y(v).toFixed(1)}`).join("L")}`, fill: "none",
      style: { stroke: s.color, strokeWidth: s.wide ? "2.4" : "1", strokeOpacity: s.wide ? "1" : "0.45" } }, h("title", {}, s.name))));
}

// ------------------------------------------------------------------------------------------------------------ views

function overview() {
  const online = state.devices.filter((d) => d.presence === "online").length;
  const running = state.coordinator.state === "running";
  const silent = state.coordinator.state === "silent";
  return [state.coordinator.text && h("p", { class: silent ? "alarm" : "hint", role: silent ? "alert" : "status" }, capital(state.coordinator.text)),
    tiles([["round", `${state.round} of ${state.rounds}`], ["devices online", running ? `${online} of ${state.devices.length}` : "unknown"],
    ["cohort's accuracy", percent(state.accuracy)], ["bundles installed", number(state.devices.filter((d) => d.bundle).length)],
    ["samples", number(state.devices.reduce((n, d) => n + (d.n_samples ?? 0), 0))],
    ["from devices", bytes(state.bytes_up)], ["to devices", bytes(state.bytes_down)]])];
}

const withholds = (id, kind) => Boolean(state.devices.find((d) => d.id === id)?.withholds.includes(kind));
const secret = () => h("span", { class: "untold" }, UNTOLD);
const untold = (id, kind, value, words) => value == null && withholds(id, kind) ? secret() : words;  // kind: of fedge egress
const context = (d, name, words) => untold(d.id, "load", d.context?.[name], words(d.context?.[name]));
const gigabytes = (x) => x == null ? "–" : `${number(x, 1)} GB`;

function fleet() {
  const words = shown.search.toLowerCase();
  const chosen = state.devices.filter((d) => d.id.toLowerCase().includes(words) &&
    (shown.only === "all" || (shown.only === "trouble" ? d.why !== "" : d.presence === shown.only)));
  const bar = h("div", { class: "bar" },
    h("input", { type: "search", placeholder: "Find a device", "aria-label": "Find a device", "data-key": "search", value: shown.search,
      oninput: (e) => { shown.search = e.target.value; render(); } }),
    h("select", { "aria-label": "Which devices", "data-key": "only", onchange: (e) => { shown.only = e.target.value; render(); } },
      [["all", "all devices"], ["online", "online"], ["offline", "offline"], ["trouble", "with something to say"]].map(([value, name]) =>
        h("option", { value, selected: shown.only === value }, name))),
    h("span", { class: "hint" }, `${chosen.length} of ${state.devices.length}`));
  return [overview(), section("Fleet", null, bar, chosen.length ? table([
    ["device", (d) => link(d.id)],
    ["state", (d) => pill(d.quarantine ? "in quarantine" : d.presence)],
    ["last heard", (d) => ago(d.seen_at), "n"],
    ["bundle", (d) => d.release ? `release ${d.release}` : "none", "n"],
    ["load", (d) => context(d, "load", (x) => number(x, 2)), "n"],
    ["free RAM", (d) => context(d, "free_ram_gb", gigabytes), "n"],
    ["°C", (d) => context(d, "temperature_c", number), "n"],
    ["trained", (d) => number(d.trained), "n"],
    ["this round", (d) => d.now ? pill(d.now) : "–"],
    ["why", (d) => d.why || "", "why"],
  ], chosen) : h("p", { class: "hint" }, state.devices.length ? "No device is like that." : "No device has shown itself yet. Start one with fedge agent."))];
}

function clusters() {
  if (!state.clusters.length) return section("Clusters", "There is one model for all so far.", null);
  const [w, hgt] = [720, state.clusters.length > 2 ? 420 : 220];
  const hubs = new Map(state.clusters.map((c, k) => {
    const angle = 2 * Math.PI * k / state.clusters.length - Math.PI * (state.clusters.length === 2 ? 1 : 0.5);
    return [c.name, state.clusters.length === 1 ? [w / 2, hgt / 2] : [w / 2 + 220 * Math.cos(angle), hgt / 2 + 150 * Math.sin(angle)]];
  }));
  const size = (c) => 18 + 3 * Math.sqrt(c.members.length);
  const places = state.devices.filter((d) => d.clusters.some((name) => hubs.has(name))).map((d, k) => {
    const own = d.clusters.map((name) => hubs.get(name)).filter(Boolean);
    const c = state.clusters.find((each) => each.name === d.clusters[0]);
    const alone = own.length === 1 && c.members.length <= 12;  // on a ring, so that names do not meet
    const turn = alone ? 2 * Math.PI * (c.members.indexOf(d.id) + 0.5) / c.members.length - Math.PI / 2 : k * 2.39996;
    const far = alone ? size(c) + 22 : 22 + 34 * ((k * 0.618) % 1);
    return { d, turn, x: own.reduce((s, p) => s + p[0], 0) / own.length + far * Math.cos(turn), y: own.reduce((s, p) => s + p[1], 0) / own.length + far * Math.sin(turn) };
  });
  const named = places.length <= 40;
  const map = h("svg", { viewBox: `0 0 ${w} ${hgt}`, role: "img", "aria-label": "Devices around their experts; the lists beside say the same" },
    places.flatMap(({ d, x, y }) => d.clusters.map((name) => { const p = hubs.get(name); return p && h("line", { class: "link", x1: x, y1: y, x2: p[0], y2: p[1] }); })),
    state.clusters.map((c) => { const [x, y] = hubs.get(c.name); return [
      h("circle", { class: "hub", cx: x, cy: y, r: size(c), style: { fill: color(c.name), stroke: color(c.name) } }),
      h("text", { x, y: y + 4, "text-anchor": "middle" }, c.name)]; }),
    places.map(({ d, x, y }) => h("circle", { class: "dot", cx: x, cy: y, r: 6, style: { fill: color(d.clusters[0]) },
      onclick: () => { location.hash = `device/${encodeURIComponent(d.id)}`; } }, h("title", {}, `${d.id}: ${d.clusters.join(", ")}`))),
    named && places.map(({ d, turn, x, y }) => h("text", { x: x + (Math.cos(turn) < 0 ? -9 : 9), y: y + 4, "text-anchor": Math.cos(turn) < 0 ? "end" : "start" }, d.id)));
  return section("Clusters and experts", "One expert for each cluster. A device in several clusters stands between them, and shares what all of them learn.", h("div", { class: "beside" }, map, h("div", {},
    state.clusters.map((c) => [h("h3", {}, h("span", { class: "key" }, h("i", { style: { background: color(c.name) } }), `expert ${c.name}, ${count(c.members.length, "device")}`)),
      h("ul", { class: "cluster" }, c.members.map((id) => h("li", {}, link(id))))]))));
}

function rounds() {
  const all = state.rounds_list;
  if (!all.length) return section("Rounds", "No round has begun.", null);
  const w = 720, step = Math.max(Math.min(22, (w - 10) / all.length), 3), top = Math.max(...all.map((r) => r.asked), 1);
  const bars = h("svg", { class: "timeline", viewBox: `0 0 ${w} 130`, role: "img", "aria-label": "How many devices answered in each round" },
    all.slice(-Math.floor((w - 10) / step)).map((r, k) => {
      let y = 120;
      return h("g", { onclick: () => { location.hash = `round/${r.round}`; } }, ["answered", "late", "failed", "open"].map((name) => {
        const tall = 110 * r[name] / top; y -= tall;
        return tall > 0 && h("rect", { class: name, x: 5 + k * step, y, width: Math.max(step - 2, 1.5), height: tall }, h("title", {}, `round ${r.round}: ${r[name]} ${name}`));
      }));
    }));
  return section("Rounds", "Orders of each round: answered, late, failed or declined, and still open.", bars,
    h("p", {}, [["answered", "cluster-2"], ["late", "cluster-1"], ["failed or declined", "cluster-6"], ["open", "faint"]].map(([name, k]) => h("span", { class: "key" }, h("i", { style: { background: `var(--${k})` } }), name))),
    table([["round", (r) => h("a", { href: `#round/${r.round}`, "data-key": `r:${r.round}` }, String(r.round)), "n"], ["began", (r) => clock(r.begun_at)],
      ["took", (r) => r.done_at ? took(r.done_at - r.begun_at) : "under way", "n"], ["orders", (r) => number(r.asked), "n"], ["answered", (r) => number(r.answered), "n"],
      ["late", (r) => number(r.late), "n"], ["failed", (r) => number(r.failed), "n"], ["accuracy", (r) => percent(r.accuracy), "n"],
      ["up", (r) => bytes(r.bytes_up), "n"], ["down", (r) => bytes(r.bytes_down), "n"]], all.slice().reverse().slice(0, 200)));
}

function accuracy() {
  const told = state.devices.filter((d) => d.accuracy.length).sort((a, b) => a.accuracy.at(-1)[1] - b.accuracy.at(-1)[1]);
  const silent = state.devices.filter((d) => !d.accuracy.length);
  const names = (devices) => devices.slice(0, 100).map((d, k) => [k ? ", " : "", link(d.id)]);
  const [hidden, unmeasured] = [silent.filter((d) => d.withholds.includes("loss")), silent.filter((d) => !d.withholds.includes("loss"))];
  return [section("Accuracy", "Of the model that each device began a round with, on its own validation samples; bold: the mean of the cohort.",
    lines([...told.slice(0, 60).map((d) => ({ name: d.id, points: d.accuracy, color: "var(--soft)" })),
      { name: "mean of the cohort", points: state.history.filter((r) => r.accuracy !== null).map((r) => [r.round, r.accuracy]), color: "var(--accent)", wide: true }], "Accuracy by round")),
  section("Devices, the worst first", null, table([["device", (d) => link(d.id)], ["last", (d) => percent(d.accuracy.at(-1)[1]), "n"],
    ["in round", (d) => String(d.accuracy.at(-1)[0]), "n"], ["over time", (d) => spark(d.accuracy)]], told),
  hidden.length > 0 && h("p", { class: "hint" }, h("span", { class: "untold" }, `${UNTOLD}: `), names(hidden)),
  unmeasured.length > 0 && h("p", { class: "hint" }, "Nothing measured yet: ", names(unmeasured)))];
}

function samples() {
  const health = (d) => d.health ?? {};
  const usable = state.devices.reduce((n, d) => n + (d.n_samples ?? 0), 0);
  const sum = (name) => number(state.devices.reduce((n, d) => n + (health(d)[name] ?? 0), 0));
  const use = (d, name) => untold(d.id, "use", withholds(d.id, "use") ? null : health(d)[name], number(d.health?.[name]));
  const measured = (d, name, words) => untold(d.id, "loss", health(d).now?.[name], words(health(d).now?.[name]));
  return [tiles([["may be used to train", number(usable)], ["devices that tell how many", number(state.devices.filter((d) => d.n_samples !== null).length)],
    ["predictions at work", sum("n_predictions")], ["of them failed", sum("n_failed")], ["devices whose inputs drift", number(state.devices.filter((d) => health(d).drift).length)]]),
  section("Samples", "What devices say of their data: how many may be used; how the bundle of the last rollout does on the samples that they keep apart; and what fedge serve has seen since it was started. A shift is in deviations of the bundle's own samples: above 1, the device sees something else. Outliers are predictions of samples unlike the bundle's own; which samples stays on the device.",
    table([["device", (d) => link(d.id)], ["may be used", (d) => untold(d.id, "count", d.n_samples, number(d.n_samples)), "n"],
      ["share", (d) => d.n_samples == null || !usable ? "–" : percent(d.n_samples / usable), "n"],
      ["kept apart", (d) => untold(d.id, "count", health(d).now?.n || null, number(health(d).now?.n)), "n"], ["accuracy there", (d) => measured(d, "accuracy", percent), "n"],
      ["shift", (d) => measured(d, "free_energy", (x) => number(x, 2)), "n"], ["predictions", (d) => use(d, "n_predictions"), "n"], ["failed", (d) => use(d, "n_failed"), "n"],
      ["outliers", (d) => untold(d.id, "use", d.outliers, percent(d.outliers)), "n"],
      ["inputs", (d) => health(d).drift ? pill("drift") : withholds(d.id, "use") ? secret() : d.health ? "as ever" : "–", "s"]], state.devices))];
}

function rollouts() {
  if (!detail?.rollouts) return section("Rollouts", "…");
  if (!detail.rollouts.length) return section("Rollouts", "No repository is shown here: name the folders of fedge release with --rollouts.");
  return detail.rollouts.map(rollout);
}

const NEXT = { pause: "Pause", resume: "Resume", abort: "Roll back", "go-on": "Supervise again" };

function rollout(r) {
  const { plan, progress } = r;
  const lines = Object.entries(r.devices ?? {}).sort((a, b) => byName(a[0], b[0]));
  const share = (x) => `${number(100 * x)} %`;
  const buttons = session.may_act && r.actions.filter((name) => NEXT[name]).map((name) => act(NEXT[name], `rollout-${name}`, { rollout: r.rollout }, name === "abort"));
  const facts = plan && [["state", [pill(progress.state), r.supervised || progress.state === "done" || progress.state === "aborted" ? "" : " nobody supervises it now"]],
    ["release", `${plan.release} (${plan.target})`], ["stage", `${progress.stage + 1} of ${plan.stages.length}: ${lines.filter(([, d]) => d.takes_part).length} of ${lines.length} devices take part`],
    ["runs on", `${lines.filter(([, d]) => d.release === plan.release && (d.phase === "serving" || d.phase === "trial")).length} of ${lines.length} devices`],
    ["first", plan.canaries?.join(", ") || "the first share"], ["stages", plan.stages.map((x) => x ? share(x) : "the first").join(", ")], ["since", ago(progress.began)],
    ["why", progress.reasons?.length ? h("ul", {}, progress.reasons.map((why) => h("li", {}, why))) : "–"]];
  const part = section(`Rollout of ${r.rollout}`, plan ? null : "No rollout was started from this repository yet.",
    plan && h("dl", {}, facts.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])),
    buttons?.length > 0 && h("div", { class: "bar" }, buttons), session.may_act && r.actions.includes("start") && starter(r),
    plan && h("h3", {}, "Devices"), plan && table([["device", ([id]) => link(id)], ["phase", ([, d]) => h("span", {}, pill(d.phase), ` release ${d.release}`), "s"], ["takes part", ([, d]) => d.takes_part ? "yes" : "not yet", "s"],
      ["why", ([, d]) => d.reason ?? "", "why"], ["accuracy", ([id, d]) => change(id, d, "accuracy", (x) => (100 * x).toFixed(1), " %"), "n"],
      ["latency", ([id, d]) => change(id, d, "latency_ms", (x) => number(x, 1), " ms", "load"), "n"],
      ["free energy", ([id, d]) => change(id, d, "free_energy", (x) => number(x, 2)), "n"], ["°C", ([id, d]) => untold(id, "load", d.temperature_c, number(d.temperature_c)), "n"],
      ["inputs", ([id, d]) => d.drift ? pill("drift") : withholds(id, "use") ? secret() : "as ever", "s"], ["heard", ([, d]) => ago(d.seen_at), "n"]], lines),
    r.events?.length > 0 && [h("h3", {}, "Events"), table([["when", (e) => clock(e.at)], ["device", (e) => e.device ? link(e.device) : ""], ["what", (e) => e.text, "why"]], r.events.slice(-50).reverse())],
    r.earlier?.length > 0 && [h("h3", {}, "Earlier rollouts"), table([["rollout", (e) => e.id], ["release", (e) => e.target], ["state", (e) => pill(e.state)], ["ended", (e) => clock(e.began)],
      ["why", (e) => (e.reasons ?? []).join("; "), "why"]], r.earlier.slice().reverse())]);
  part.dataset.rollout = r.rollout;
  return part;
}

function change(id, d, name, words, unit = "", kind = "loss") {  // a figure of the bundle before, and of the one that is rolled out
  const [was, now] = [d.before?.[name], d.now?.[name]];
  if (was == null && now == null) return untold(id, kind, null, "–");
  return `${was == null ? "" : `${words(was)} → `}${now == null ? "–" : words(now)}${unit}`;
}

function starter(r) {
  if (!r.targets.length) return h("p", { class: "hint" }, "Nothing is released in this repository yet: fedge release add.");
  const kept = (name, value) => ({ "data-key": `${name}:${r.rollout}`, "data-field": name, value: drafts[`${name}:${r.rollout}`] ?? value, oninput: (e) => { drafts[`${name}:${r.rollout}`] = e.target.value; } });
  const chosen = drafts[`target:${r.rollout}`] ?? r.targets[0];
  return h("form", { class: "bar start", onsubmit: (e) => {
    e.preventDefault();
    const body = Object.fromEntries([...e.target.querySelectorAll("[data-field]")].map((field) => [field.dataset.field, field.value.trim()]));
    ask("Start the rollout", "rollout-start", { rollout: r.rollout, ...body });
  } }, h("label", {}, "release ", h("select", kept("target", null), r.targets.map((value) => h("option", { value, selected: value === chosen }, r.aborted.includes(value) ? `${value}, which was aborted` : value)))),
  h("label", {}, "shares ", h("input", { placeholder: "as configured", size: 12, ...kept("stages", "") })),
  h("label", {}, "first ", h("input", { placeholder: "devices", size: 12, ...kept("canary", "") })),
  h("button", { "data-key": `a:rollout-start:${r.rollout}` }, "Start a rollout"));
}

const eventRow = [["when", (e) => clock(e.at)], ["round", (e) => String(e.round), "n"], ["event", (e) => e.name.replaceAll("_", " ")],
  ["device", (e) => e.device ? link(e.device) : ""], ["what", (e) => e.text, "why"]];
const eventsView = () => section("Events", "The newest first; fedge events tells more.", table(eventRow, events.slice().reverse()));

const outcome = [["outcome", (r) => pill(r.outcome)], ["took", (r) => r.seconds ? took(r.seconds) : "–", "n"], ["sent", (r) => bytes(r.bytes), "n"],
  ["why asked", (r) => r.chosen, "why"], ["why not done", (r) => r.why, "why"]];

function device(id) {
  const d = state.devices.find((each) => each.id === id);
  const told = detail?.device === id ? detail : null;
  if (!d) return section(id, "No device of this name is known.", null);
  const c = d.context ?? {};
  const facts = [["state", [pill(d.quarantine ? "in quarantine" : d.presence), ` heard ${ago(d.seen_at)}`]], ["why", d.why || "nothing is wrong"],
    ["bundle", d.release ? `release ${d.release}` : "none"], ["samples that may be used", untold(id, "count", d.n_samples, number(d.n_samples))], ["trained", count(d.trained, "time")],
    ["clusters", d.clusters.join(", ") || "–"], ["context", withholds(id, "load") ? secret()
      : [["load", c.load, (x) => number(x, 2)], ["RAM free", c.free_ram_gb, gigabytes], ["disk free", c.free_disk_gb, gigabytes], ["temperature", c.temperature_c, (x) => `${number(x)} °C`], ["battery", c.battery, percent]]
        .filter(([, x]) => x != null).map(([name, x, words]) => `${name} ${words(x)}`).join(", ") || "–"],
    ["not told by its owner", d.withholds.join(", ") || "nothing"]];
  return [section(id, null, h("dl", {}, facts.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])),
    session.may_act && h("p", { class: "bar" }, d.retired ? act("Give it orders again", "readmit", { device: id }) : act("Retire this device", "retire", { device: id }, true))),
  section("Accuracy", null, withholds(id, "loss") ? h("p", {}, secret()) : lines([{ name: id, points: d.accuracy, color: "var(--accent)", wide: true }], `Accuracy of ${id}`)),
  told && section("What it was asked", "And why not, where it was not.", table([["round", (r) => h("a", { href: `#round/${r.round}` }, String(r.round)), "n"], ["step", (r) => r.step],
    ...outcome], told.rounds)),
  told && section("Events", null, table(eventRow, told.events.slice().reverse()))];
}

function round(name) {
  const told = detail?.round === Number(name) ? detail : null;
  if (!told) return section(`Round ${name}`, "…", null);
  return section(`Round ${name}`, told.text, table([["device", (r) => link(r.device)], ["step", (r) => r.step], ...outcome], told.devices));
}

// ---------------------------------------------------------------------------------------------------------- actions

function act(words, name, body = {}, danger = false) {
  return h("button", { class: danger ? "danger" : null, "data-key": `a:${name}:${body.device ?? body.rollout ?? ""}`,
    onclick: () => danger ? ask(words, name, body) : send(name, body) }, words);
}

function ask(words, name, body) {
  const box = $("dialog");
  const about = body.rollout ? ` (${body.rollout}${body.target ? `, ${body.target}` : ""})` : "";
  const what = { "rollout-abort": "The devices that run the release go back to the bundle before.", "rollout-start": "The first devices begin with it at once.", retire: `${body.device} gets no more orders. Its installed bundle goes on answering.`, recluster: "All clusters are made anew in the next round." }[name] ?? "";
  box.replaceChildren(h("form", { method: "dialog" }, h("h2", {}, `${words}${about}?`), h("p", { class: "hint" }, what),
    h("div", { class: "bar" }, h("button", { id: "confirm", class: "danger", onclick: () => send(name, body) }, words), h("button", { autofocus: true }, "Cancel"))));
  box.showModal();
}

async function send(name, body) {
  const answer = await fetch(`api/actions/${name}`, { method: "POST", headers: { "Content-Type": "application/json", "X-Fedge-Token": session.csrf }, body: JSON.stringify(body) });
  const told = await answer.json().catch(() => ({}));
  notice(answer.ok ? told.text ?? "" : `That was refused: ${told.error ?? answer.status}`);
  await refresh();
}

function login() {
  const box = $("dialog");
  const field = h("input", { type: "password", name: "token", autocomplete: "current-password", "aria-label": "Token", required: true, autofocus: true });
  box.replaceChildren(h("form", { onsubmit: async (e) => {
    e.preventDefault();
    const answer = await fetch("api/login", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ token: field.value }) });
    if (answer.ok) { box.close(); await begin(); } else notice("The token is not the right one.");
  } }, h("h2", {}, "Log in"), h("p", { class: "hint" }, "The token is in the file ui-token of the coordinator's home, or what --token of fedge ui or token in [ui] of the configuration says."), field,
  h("div", { class: "bar" }, h("button", {}, "Log in"), h("button", { type: "button", onclick: () => box.close() }, "Cancel"))));
  box.showModal();
}

function notice(text) { const p = $("notice"); p.textContent = text; p.hidden = !text; }

// --------------------------------------------------------------------------------------------------------- the page

function heading() {
  $("federation").textContent = state.federation;
  $("method").textContent = state.method;
  $("phase").textContent = `${state.text}, as it was ${span(state.age_s)} ago`;
  document.title = `${state.federation} · fedge`;
  const actions = session.may_act
    ? [state.paused ? act("Resume", "resume") : !state.done && act("Pause", "pause"), state.paused && act("Run one round", "run-now"), !state.done && act("Re-cluster", "recluster", {}, true)]
    : [session.login && h("button", { onclick: login, "data-key": "login" }, "Log in")];
  $("actions").replaceChildren(...actions.filter(Boolean));
}

function mark(tab) {  // the tabs stay as they are, so that a phone does not lose where they were scrolled to
  const bar = $("tabs");
  if (!bar.children.length) bar.append(...TABS.map(([id, words]) => h("a", { href: `#${id}`, "data-key": `t:${id}` }, words)));
  for (const link of bar.children) {
    const current = link.hash === `#${tab}`;
    if (current && !link.hasAttribute("aria-current")) bar.scrollLeft = link.offsetLeft - bar.clientWidth / 2 + link.clientWidth / 2;
    if (current) link.setAttribute("aria-current", "page"); else link.removeAttribute("aria-current");
  }
}

function render() {
  if (!state) return;
  const [view, name] = location.hash.slice(1).split("/").map(decodeURIComponent);
  const key = document.activeElement?.dataset?.key;
  const at = document.activeElement?.selectionStart;
  heading();
  const tab = { device: "fleet", round: "rounds" }[view] ?? (view || "fleet");
  mark(tab);
  const made = { clusters, rounds, accuracy, samples, rollouts, events: eventsView, device: () => device(name), round: () => round(name) }[view] ?? fleet;
  $("main").replaceChildren(...[made()].flat(3).filter(Boolean));
  if (key) {
    const again = document.querySelector(`[data-key="${CSS.escape(key)}"]`);
    again?.focus({ preventScroll: true });
    if (at !== undefined && at !== null && again?.setSelectionRange) again.setSelectionRange(at, at);
  }
}

async function get(path) {
  const answer = await fetch(path);
  const told = await answer.json();
  if (!answer.ok) throw Object.assign(new Error(told.error), { status: answer.status });
  return told;
}

async function refresh() {
  const [view, name] = location.hash.slice(1).split("/");
  try {
    state = await get("api/state");
    state.devices.sort((a, b) => byName(a.id, b.id));
    if (view === "rollouts") detail = await get("api/rollouts");
    if (view === "device" || view === "round") detail = await get(`api/${view}s/${name}`);
    render();
  } catch (error) {
    notice(error.status === 401 ? "Log in to see the fleet." : error.status ? error.message : "The coordinator's page does not answer; trying again.");
    if (error.status === 401) login();
  }
}

let due = null;
function soon() { due ??= setTimeout(() => { due = null; refresh(); }, 400); }

async function begin() {
  session = await get("api/session");
  if (session.login && !session.may_read) { login(); return; }
  events = (await get(`api/events?last=${MAX_EVENTS}`)).events;
  await refresh();
  const stream = new EventSource(`api/stream?after=${events.at(-1)?.number ?? 0}`);
  stream.onopen = () => notice("");
  stream.onmessage = (message) => { events = [...events, JSON.parse(message.data)].slice(-MAX_EVENTS); soon(); };
  stream.addEventListener("state", soon);
  stream.onerror = soon;  // says why: the page does not answer, or the login has ended
}

addEventListener("hashchange", () => { refresh(); $("main").focus(); scrollTo(0, 0); });
begin();
