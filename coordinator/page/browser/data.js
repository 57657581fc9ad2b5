// What the server tells: the state, put together from differences, and who is looking.

import { byName, number, percent } from "./words.js";

export const data = {
  fleet: {}, // what is true of the federation as a whole
  devices: [],
  rounds: [],
  history: [],
  byId: new Map(), // devices
  byRound: new Map(),
  loaded: false,
  at: 0, // when the server was last heard, by our clock
  session: { may_act: false, may_read: true, login: false, logout: false, csrf: "", name: "" },
};
const ANSWER_MS = 15000; // longest time for what is read
let version = "";
let tables = {};

export async function ask(path, options = { signal: AbortSignal.timeout(ANSWER_MS) }) {
  const answer = await fetch(path, options);
  const told = await answer.json().catch(() => ({}));
  if (!answer.ok)
    throw Object.assign(new Error(told.error ?? `the server answered ${answer.status}`), { status: answer.status });
  return told;
}

export const post = (path, body) =>
  ask(path, {
    method: "POST",
    body: JSON.stringify(body),
    headers: { "Content-Type": "application/json", "X-Fedge-Token": data.session.csrf },
  });

export async function readState() {
  const told = await ask(`api/state?since=${encodeURIComponent(version)}`);
  if (told.whole) tables = {};
  for (const [name, columns] of Object.entries(told.tables)) {
    const rows = (tables[name] ??= []);
    for (const [field, { at, is }] of Object.entries(columns))
      is.forEach((value, k) => {
        (rows[at ? at[k] : k] ??= {})[field] = value;
      });
  }
  version = told.version;
  const present = (name) => (tables[name] ?? []).filter((row) => row && !row.gone);
  data.fleet = { clusters: [], actions: [], ...present("fleet")[0] };
  data.devices = present("devices").sort((a, b) => byName(a.id, b.id));
  data.rounds = present("rounds").sort((a, b) => a.round - b.round);
  data.history = present("history").sort((a, b) => a.round - b.round);
  data.byId = new Map(data.devices.map((d) => [d.id, d]));
  data.byRound = new Map(data.rounds.map((r) => [r.round, r]));
  data.loaded = true;
  data.at = Date.now() / 1000;
}

export const readSession = async () => {
  data.session = await ask("api/session");
};

/** Forget everything, since somebody else may look from now on. */
export function forget() {
  version = "";
  tables = {};
  Object.assign(data, {
    fleet: { clusters: [], actions: [] },
    devices: [],
    rounds: [],
    history: [],
    byId: new Map(),
    byRound: new Map(),
    loaded: false,
  });
}

/** What the score is called, and whether it is a share: accuracy unless the task asks another problem. */
export const score = () => data.fleet.score ?? { words: "accuracy", share: true };
export const scoreHeading = () => score().words[0].toUpperCase() + score().words.slice(1);
export const formatScore = (x) => (x == null || score().share ? percent(x) : number(x, 3));

export const withholds = (d, kind) => Boolean(d?.withholds?.includes(kind));

/** The accuracy of the bundle that answers, before that of what is in training: [share, of what it is, on how many]. */
export function findAccuracy(d) {
  if (d["shown.of"]) return [d["shown.share"], d["shown.of"], d["shown.n"] ?? null];
  return d.accuracy == null ? [null, "", null] : [d.accuracy, "in training", null];
}

export function getWork(d) {
  const of = (name) => d[`at_work.${name}`] ?? d[`health.at_work.${name}`] ?? null;
  return {
    right: of("right") ?? 0,
    wrong: of("wrong") ?? 0,
    recent: of("recent"),
    covered: of("covered"),
    coverage: of("coverage"),
    n: (of("right") ?? 0) + (of("wrong") ?? 0),
  };
}

export const drifts = (d) => Boolean(d.drift ?? d["health.drift"]);
export const driftKind = (d) => d.drift_kind ?? d["health.drift_kind"] ?? null;
export const getState = (d) =>
  d.quarantine || d["quarantine.until"] != null ? "in quarantine" : d.retired ? "retired" : (d.presence ?? "not seen");
