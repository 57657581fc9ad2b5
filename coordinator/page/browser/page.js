// The fleet's page: what is looked at, and how it stays up to date.

import * as chartPart from "./chart.js";
import { campaigns } from "./campaigns.js";
import { ask, data, readSession, readState, scoreHeading } from "./data.js";
import { clusters, device, round } from "./device.js";
import { act, isAsking, login, logout, notice, onDone } from "./dialogs.js";
import { h, keepFocus, patch, whenReleased } from "./dom.js";
import { events, readEvents } from "./events.js";
import { fleet, LOUD, samples } from "./fleet.js";
import { rollouts } from "./rollouts.js";
import { accuracy, listDrawn, rounds } from "./rounds.js";
import * as tablePart from "./table.js";
import { age, capital, count, hint, number, span } from "./words.js";

const TABS = [
  ["fleet", "Fleet"],
  ["campaigns", "Campaigns"],
  ["clusters", "Clusters"],
  ["rounds", "Rounds"],
  ["accuracy", "Accuracy"],
  ["samples", "Samples"],
  ["rollouts", "Rollouts"],
  ["events", "Events"],
];
const PARENT = { device: "fleet", round: "rounds" };
const $ = (id) => document.getElementById(id);
const encode = encodeURIComponent;

// Views, each with what it reads beside the state, and a value that changes when that must be read again.

const stamp = (...values) => JSON.stringify(values);
const VIEWS = {
  fleet: { show: fleet },
  campaigns: { show: (_, detail) => campaigns(detail), read: () => ask("api/rollouts"), stamp: () => Date.now() },
  clusters: { show: clusters },
  rounds: { show: rounds },
  samples: { show: samples },
  accuracy: {
    show: (_, detail) => accuracy(detail),
    read: () => ask(`api/accuracy?of=${listDrawn().map(encode).join(",")}`),
    stamp: () => stamp(data.fleet.round, data.rounds.at(-1)?.done_at, listDrawn()),
  },
  rollouts: { show: (_, detail) => rollouts(detail), read: () => ask("api/rollouts"), stamp: () => Date.now() },
  events: { show: (_, detail) => events(detail), read: readEvents, stamp: () => Date.now() },
  device: {
    show: device,
    read: (name) => ask(`api/devices/${encode(name)}`),
    stamp: (name) => {
      const d = data.byId.get(name) ?? {};
      return stamp(d.now, d.trained, d.presence, d.why, d.accuracy_round);
    },
  },
  round: {
    show: round,
    read: (name) => ask(`api/rounds/${encode(name)}`),
    stamp: (name) => {
      const r = data.byRound.get(Number(name)) ?? {};
      return stamp(r.asked, r.answered, r.late, r.failed, r.done_at);
    },
  },
};

function getPlace() {
  const [view, ...rest] = location.hash.slice(1).split("/").map(decodeURIComponent);
  const known = VIEWS[view] ? view : "fleet";
  return { view: known, name: rest.join("/"), hash: `${known}/${rest.join("/")}` };
}

let detail = { hash: "", stamp: "", value: null, error: "" };
let lost = ""; // why the server cannot be read

async function readDetail() {
  const place = getPlace();
  const { read, stamp: of } = VIEWS[place.view];
  if (detail.hash !== place.hash) detail = { hash: place.hash, stamp: "", value: null, error: "" };
  const own = detail;
  const now = of?.(place.name) ?? "";
  if (!read || own.stamp === now) return;
  try {
    own.value = await read(place.name);
    own.error = "";
    own.stamp = now;
  } catch (error) {
    if (error.status === undefined || error.status === 401) throw error;
    own.error = capital(error.message);
  }
}

// ---------------------------------------------------------------------------------------------------------- drawing

function heading() {
  const { fleet, session } = data;
  $("federation").textContent = fleet.federation ?? "fedge";
  $("method").textContent = fleet.method ?? "";
  $("phase").textContent = data.loaded
    ? `${capital(fleet.text)}; as it was ${span((fleet.age_s ?? 0) + age(data.at))} ago`
    : "";
  document.title = data.loaded ? `${fleet.federation} · fedge` : "fedge";
  const may = (name) => data.loaded && session.may_act && fleet.actions.includes(name);
  patch($("actions"), [
    may("pause") && (fleet.paused ? act("Resume", "resume") : !fleet.done && act("Pause", "pause")),
    may("run-now") && fleet.paused && act("Run one round", "run-now"),
    may("recluster") && !fleet.done && act("Re-cluster", "recluster", {}, "asks"),
    session.login &&
      h("button", { type: "button", key: "login", "data-key": "login", onclick: () => login(begin) }, "Log in"),
    session.logout &&
      h("button", { type: "button", key: "logout", "data-key": "logout", onclick: () => logout(begin) }, "Log out"),
  ]);
}

function alarm() {
  const { fleet } = data;
  const isSilent = data.loaded && fleet.coordinator.state === "silent";
  const loud = (fleet.attention ?? []).filter(
    (each) => LOUD.includes(each.kind) && !(isSilent && each.kind === LOUD[0]),
  );
  const lines = [
    lost && `${lost} ${data.loaded ? `What is shown is ${span(age(data.at))} old.` : ""}`,
    isSilent && capital(fleet.coordinator.text),
    ...loud.map((each) => `${capital(each.text)}${each.since ? `, since ${span(age(each.since))}` : ""}: ${each.do}`),
  ].filter(Boolean);
  patch(
    $("alarm"),
    lines.map((text) => h("p", { key: text.slice(0, 20) }, text)),
  );
  const ended = data.loaded && fleet.coordinator.state !== "silent" && fleet.coordinator.text;
  return ended ? h("p", { key: "ended", class: "hint wide" }, capital(ended)) : null;
}

function tabs(view) {
  const shown = TABS.filter(([id]) => id !== "campaigns" || data.fleet.campaign || view === id);
  const marked = data.fleet.attention?.length ?? 0;
  patch(
    $("tabs"),
    shown.map(([id, words]) =>
      h(
        "a",
        { key: id, href: `#${id}`, "data-key": `t:${id}`, "aria-current": id === view ? "page" : null },
        `${id === "accuracy" ? scoreHeading() : words} `,
        id === "fleet" &&
          marked > 0 &&
          h("span", { class: "badge", "aria-label": `, ${count(marked, "matter")} to look at` }, number(marked)),
      ),
    ),
  );
}

function showTab() {
  // a phone sees the tab that it is on
  const bar = $("tabs"),
    current = bar.querySelector("[aria-current]");
  if (current) bar.scrollLeft = current.offsetLeft - bar.clientWidth / 2 + current.clientWidth / 2;
}

function main({ view, name, hash }) {
  if (!data.loaded)
    return lost
      ? null
      : data.session.may_read
        ? hint("Loading…")
        : h(
            "section",
            { key: "out" },
            h("h2", {}, "Log in to see the fleet"),
            hint("From here the page shows itself only to who has logged in."),
          );
  try {
    return VIEWS[view].show(name, detail.hash === hash ? detail : { value: null, error: "" });
  } catch (error) {
    console.error(error);
    return h(
      "section",
      { key: "broken" },
      h("h2", {}, "This view cannot be shown"),
      h("p", { class: "error" }, error.message),
    );
  }
}

let last = "";
function render() {
  const place = getPlace();
  keepFocus(() => {
    heading();
    tabs(PARENT[place.view] ?? place.view);
    const own = h("div", { key: `view:${place.hash}`, class: "view" }, main(place));
    patch($("main"), [alarm(), own]);
  });
  const now = `${place.view} ${$("tabs").scrollWidth}`;
  if (last !== now) showTab();
  last = now;
}
const draw = () => whenReleased(render);

// ------------------------------------------------------------------------------------------------------- up to date

const SILENT_S = 15; // the server says every few seconds that it is there
let isBusy = false,
  isAgain = false,
  due = null;

async function refresh() {
  if (isBusy) {
    isAgain = true;
    return;
  }
  isBusy = true;
  try {
    do {
      isAgain = false;
      await read();
      draw();
    } while (isAgain);
  } finally {
    isBusy = false; // whatever went wrong, the next news is read
  }
}

async function read() {
  try {
    await readState();
    await readDetail();
    lost = "";
  } catch (error) {
    if (error.status === 401) await shutOut();
    else
      lost = error.status
        ? `The page cannot read the fleet: ${error.message}.`
        : "The page's server does not answer; trying again.";
  }
}

async function shutOut() {
  data.session = { ...data.session, may_act: false, may_read: false, login: true, logout: false };
  if (!isAsking()) login(begin);
}

function soon() {
  due ??= setTimeout(() => {
    due = null;
    refresh();
  }, 400);
}

let stream = null;
async function begin() {
  try {
    await readSession();
  } catch {
    lost = "The page's server does not answer; trying again.";
    setTimeout(begin, 3000);
    draw();
    return;
  }
  stream?.close();
  draw();
  if (data.session.login && !data.session.may_read) {
    login(begin);
    return;
  }
  await refresh();
  stream = new EventSource("api/stream");
  stream.addEventListener("news", soon);
  stream.onerror = soon; // a refresh says why: the server does not answer, or the login has ended
}

const scrolls = new Map(); // how far each place was scrolled
let from = location.hash,
  isBack = false;
globalThis.navigation?.addEventListener("navigate", (event) => {
  scrolls.set(from, scrollY);
  isBack = event.navigationType === "traverse";
});
history.scrollRestoration = "manual";
addEventListener("hashchange", async () => {
  from = location.hash;
  notice("");
  const to = isBack ? (scrolls.get(from) ?? 0) : 0;
  render();
  $("main").focus({ preventScroll: true });
  scrollTo(0, to);
  await refresh();
  if (to) scrollTo(0, to);
});
addEventListener("resize", draw);
setInterval(() => {
  if (lost || (stream && age(data.at) > SILENT_S)) soon();
  draw();
}, 5000); // ages grow, and a server comes back
tablePart.onChange(() => {
  render();
  if (["accuracy", "events"].includes(getPlace().view)) refresh();
});
chartPart.onChange(render);
onDone(refresh);
begin();
