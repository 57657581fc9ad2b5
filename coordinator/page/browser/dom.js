// Descriptions of elements, and how they become what is on the page: in place, so that clicks, focus, selection and
// scrolling survive. Everything that devices name is put in as text, never as markup.

const SVG = new Set(["svg", "g", "path", "circle", "line", "text", "rect", "title"]);
const made = new WeakMap(); // element -> what it was made from: tag, key, attributes, and what handles its events

/** Describe an element. `key`: its name among its siblings, by which it is found again. */
export function h(tag, attributes = {}, ...children) {
  return { tag, key: attributes?.key, attributes: attributes ?? {}, children: list(children) };
}

const isShown = (child) => child !== null && child !== undefined && child !== false && child !== true && child !== "";
const list = (children) => [children].flat(9).filter(isShown);

/** Make the children of an element equal to their descriptions. What is there already stays, and changes. */
export function patch(element, children) {
  const wanted = list(children);
  const keys = new Set(wanted.map((want) => want.key).filter((key) => key !== undefined));
  const kept = new Map();
  for (const node of [...element.childNodes]) {
    const key = made.get(node)?.key;
    if (key !== undefined && keys.has(key)) kept.set(key, node);
    else if (key !== undefined) node.remove();
  }
  let at = element.firstChild;
  for (const want of wanted) {
    const node = want.key === undefined ? reuse(want, at) : kept.get(want.key);
    const fits = node && isLike(node, want) ? node : make(want);
    if (want.key === undefined && fits === node) while (at !== node) at = drop(at);
    if (fits === at) at = at.nextSibling;
    else element.insertBefore(fits, at);
    update(fits, want);
  }
  while (at) at = drop(at);
}

function drop(node) {
  const next = node.nextSibling;
  node.remove();
  return next;
}

function reuse(want, from) {
  // the next sibling without a key that is like this, before one with a key
  for (let node = from; node && made.get(node)?.key === undefined; node = node.nextSibling)
    if (isLike(node, want)) return node;
  return null;
}

const isLike = (node, want) =>
  want.tag === undefined ? node.nodeType === Node.TEXT_NODE : made.get(node)?.tag === want.tag;

function make(want) {
  if (want.tag === undefined) return document.createTextNode("");
  const node = SVG.has(want.tag)
    ? document.createElementNS("http://www.w3.org/2000/svg", want.tag)
    : document.createElement(want.tag);
  made.set(node, { tag: want.tag, key: want.key, attributes: {}, on: {} });
  return node;
}

function update(node, want) {
  if (want.tag === undefined) {
    const text = String(want);
    if (node.data !== text && !isSelected(node)) node.data = text;
    return;
  }
  const of = made.get(node);
  for (const name of new Set([...Object.keys(of.attributes), ...Object.keys(want.attributes)])) {
    if (name !== "key" && name !== "value") change(node, of, name, want.attributes[name]);
  }
  patch(node, want.children);
  const { value } = want.attributes;
  if (value !== undefined && value !== null && value !== of.attributes.value && value !== node.value)
    node.value = value;
  of.attributes = want.attributes;
}

function change(node, of, name, value) {
  if (name.startsWith("on")) {
    const type = name.slice(2);
    if (!(type in of.on)) node.addEventListener(type, (event) => of.on[type]?.(event));
    of.on[type] = value;
  } else if (name === "style") {
    if (value) for (const [key, of_] of Object.entries(value)) if (node.style[key] !== of_) node.style[key] = of_; // the page's policy forbids the attribute
  } else if (of.attributes[name] !== value) {
    if (value === null || value === undefined || value === false) node.removeAttribute(name);
    else node.setAttribute(name, value === true ? "" : value);
  }
}

function isSelected(node) {
  // what somebody marks to copy it stays until it is marked no more
  const selection = document.getSelection();
  return Boolean(
    selection && !selection.isCollapsed && selection.rangeCount && selection.getRangeAt(0).intersectsNode(node),
  );
}

// While a pointer is down nothing moves: a click needs the same element at its begin and its end.

const LONGEST_PRESS_MS = 5000;
let pressed = 0;
let waiting = null;

export function whenReleased(work) {
  if (performance.now() - pressed > LONGEST_PRESS_MS) work();
  else waiting = work;
}

function release() {
  setTimeout(() => {
    pressed = -Infinity;
    const work = waiting;
    waiting = null;
    work?.();
  });
}
pressed = -Infinity;
addEventListener(
  "pointerdown",
  () => {
    pressed = performance.now();
  },
  true,
);
addEventListener("pointerup", release, true);
addEventListener("pointercancel", release, true);

/** Do work that changes the page, and give the focus back if it moved the element that has it. */
export function keepFocus(work) {
  const active = document.activeElement;
  const at = active?.selectionStart;
  work();
  if (!active || active === document.body || active === document.activeElement || !active.isConnected) return;
  active.focus({ preventScroll: true });
  if (at !== undefined && at !== null && active.setSelectionRange) active.setSelectionRange(at, at);
}
