"use strict";
// What all pages share: elements, words, tables of columns, and a canvas with a tip.
const report = JSON.parse(document.getElementById("document").textContent);
const page = document.getElementById("page");

/** Make an element. Text is always text: nothing from a checkpoint is read as HTML. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== undefined && child !== null && child !== false));
  return element;
}

/** Escape what does not print: a name could turn the text around it. */
function clean(text) {
  return String(text).replace(/[\p{C}\p{Zl}\p{Zp}]/gu, (c) => "\\u{" + c.codePointAt(0).toString(16) + "}");
}

/** Show a command; what comes from a checkpoint is quoted, for a shell may read it. */
function command(...words) {
  const quote = (word) => /^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", `'"'"'`)}'`;
  return make("code", {}, clean(["streamshard", ...words.map(quote)].join(" ")));
}

/** Show a name of a parameter or a file; a line may break after its dots and underlines. */
function named(text) {
  const parts = clean(text).split(/(?<=[._/])/);
  return make("span", { class: "name" }, ...parts.flatMap((part) => [part, make("wbr")]));
}

const number = (value) => value.toLocaleString("en-US");
const counted = (count, noun) => `${number(count)} ${noun}${count === 1 ? "" : "s"}`;

function bytes(value) {
  if (Math.abs(value) < 1024) return `${number(value)} B`;
  for (const unit of ["KiB", "MiB", "GiB", "TiB", "PiB"]) {
    value /= 1024;
    if (Math.abs(value) < 1024 || unit === "PiB") return `${value.toFixed(1)} ${unit}`;
  }
}

/** Return the values of a column: a list, runs of whole numbers, a column several times, or the number of a column. */
function values(column) {
  if (!column || Array.isArray(column)) return column ?? [];
  if (column.column !== undefined) return values(report.columns[column.column]);
  if (column.times) return Array(column.times).fill(values(column.of)).flat();
  return values(column.runs).flatMap(([first, step, count]) => Array.from({ length: count }, (_, i) => first + i * step));
}

/** Return the rows of a table of columns. */
function rowsOf(table = {}) {
  const columns = Object.entries(table).map(([name, column]) => [name, values(column)]);
  const count = Math.max(0, ...columns.map(([, column]) => column.length));
  return Array.from({ length: count }, (_, i) => Object.fromEntries(columns.map(([name, column]) => [name, column[i]])));
}

function facts(pairs) {
  const shown = pairs.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return make("dl", { class: "facts" }, ...shown.map(([name, value]) =>
    make("div", {}, make("dt", {}, name), make("dd", {}, typeof value === "string" ? clean(value) : value))));
}

/** Say at the top whether all is well. */
function verdict(tone, title, problems, ...more) {
  const items = problems.map((problem) => make("li", {}, clean(problem)));
  return make("div", { class: `verdict ${tone}`, role: "status" }, make("b", {}, title),
    items.length ? make("ul", {}, ...items) : null, ...more);
}

/** Draw bars of sizes, each below its name and size. */
function bars(rows) {
  const largest = Math.max(1, ...rows.map((row) => row.nbytes));
  return make("div", { class: "bars" }, ...rows.map((row, i) => {
    const bar = make("i", { class: `c${i % 6}` });
    bar.style.width = `${(100 * row.nbytes) / largest}%`;
    return make("div", {}, make("div", {}, named(row.name), make("span", { class: "mute" }, row.text ?? bytes(row.nbytes))), bar);
  }));
}

/** Make a table; the columns of a head that begins with ">" are numbers. */
function table(head, rows) {
  const isNumber = head.map((name) => name[0] === ">");
  const cell = (tag, value, i) => make(tag, { class: isNumber[i] ? "number" : value.tagName === "SPAN" ? "wide" : undefined }, value);
  return make("div", { class: "scroll", tabindex: "0" }, make("table", {},
    make("thead", {}, make("tr", {}, ...head.map((name, i) => cell("th", name.replace(">", ""), i)))),
    make("tbody", {}, ...rows.map((row) => make("tr", {}, ...row.map((value, i) => cell("td", value, i)))))));
}

const tip = make("div", { id: "tip", hidden: "" });
document.body.append(tip);

function showTip(event, lines) {
  tip.hidden = !lines;
  if (!lines) return;
  tip.replaceChildren(...lines.map((line, i) => make(i ? "div" : "b", {}, clean(line))));
  const below = event.clientY + 18 + tip.offsetHeight < innerHeight;
  tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${below ? event.clientY + 18 : event.clientY - tip.offsetHeight - 10}px`;
}

const theme = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/** Make a canvas that is drawn again when its width or the colours change. `tell` says what is at a point. */
function drawing(label, height, draw, { tell, choose, key } = {}) {
  const canvas = make("canvas", { role: "img", "aria-label": clean(label), tabindex: key ? "0" : undefined });
  canvas.style.height = `${height}px`;
  canvas.draw = () => {
    const width = canvas.clientWidth, ratio = devicePixelRatio || 1;
    if (!width) return;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.font = "11px system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif";
    draw(pen, width);
  };
  const at = (event) => {
    const box = canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top, box.width];
  };
  if (tell) {
    canvas.addEventListener("pointermove", (event) => showTip(event, tell(...at(event))));
    canvas.addEventListener("pointerleave", () => showTip());
  }
  if (choose) canvas.addEventListener("click", (event) => choose(...at(event)));
  if (key) canvas.addEventListener("keydown", key);
  new ResizeObserver(() => canvas.draw()).observe(canvas);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", canvas.draw);
  return canvas;
}

/** Choose a round step that divides a length into few steps. */
function niceStep(length, most) {
  for (let power = 1; ; power *= 10) {
    for (const factor of [1, 2, 5]) if (length / (factor * power) <= most) return factor * power;
  }
}

/** Draw all, and record how long that took. */
function show(build) {
  const began = performance.now();
  page.replaceChildren(...build().filter(Boolean));
  for (const canvas of page.querySelectorAll("canvas")) canvas.draw();
  document.documentElement.dataset.milliseconds = Math.round(performance.now() - began);
}
