// The page: a list of runs beside the one that is looked at. Reads its data from the page, or from `lamella watch`.
"use strict";

(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const state = { name: null, ticked: new Set(), version: "", artifacts: 0, overlay: false, drawn: [] };
  const EVERY_MS = 2000;

  // ---- small helpers

  function el(tag, attributes = {}, ...children) {
    const node = document.createElement(tag);
    for (const [key, value] of Object.entries(attributes)) {
      if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
      else if (value === true) node.setAttribute(key, "");
      else if (value !== false && value !== null && value !== undefined) node.setAttribute(key, value);
    }
    node.append(...children.filter((c) => c !== null && c !== undefined));
    return node;
  }

  const figure = (v) => (v === null || v === undefined ? "-" : Math.abs(v) >= 1000 ? Math.round(v).toLocaleString("en") : String(Number(v.toPrecision(4))));

  async function ask(path) {
    const answer = await fetch(path, { headers: { accept: "application/json" } });
    if (answer.status === 304) return null;
    const tree = await answer.json();
    if (!answer.ok) throw new Error(tree.error || tree.detail || answer.statusText);
    return tree;
  }

  function problem(error) {
    $("problem").hidden = !error;
    $("problem").textContent = error ? String(error.message || error) : "";
  }

  // ---- tables and charts

  function table(t) {
    const numeric = new Set(t.numeric);
    const cell = (tag, text, k, more = {}) => el(tag, { class: numeric.has(k) ? "number" : null, ...more }, text);
    const rows = t.rows.map((row) => el("tr", {}, ...row.map((text, k) => (k === 0 && row.length > 1 ? cell("th", text, k, { scope: "row" }) : cell("td", text, k)))));
    const head = t.head.length ? el("thead", {}, el("tr", {}, ...t.head.map((text, k) => (text ? cell("th", text, k, { scope: "col" }) : el("td"))))) : null;
    return el("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": t.caption || "Table" },
      el("table", { class: t.facts ? "facts-table" : null }, t.caption ? el("caption", {}, t.caption) : null, head, el("tbody", {}, ...rows)));
  }

  function chartOf(chart) {
    const plot = el("div", { class: "plot", role: "img", "aria-label": `${chart.title}; the table below says the same` });
    const aside = el("p", { class: "aside" });
    const node = el("figure", { class: draw.wide(chart) ? "wide" : null }, el("figcaption", {}, chart.title), plot, aside,
      el("details", {}, el("summary", {}, `Table: ${chart.title}`), table(chart.table)));
    const entry = { chart, plot, aside, node, drawn: null };
    state.drawn.push(entry);
    return entry;
  }

  function paint(entry) {
    const option = draw.option(entry.chart), notes = [];
    if (option.height) entry.plot.style.height = `${option.height}px`;
    if (option.aside) notes.push(option.aside);
    if (entry.chart.thinned) notes.push(data.live ? "Thinned to what the screen shows; zoom in (Ctrl and wheel, or pinch) for every step." : "Thinned: least and greatest value of each stretch of steps; lamella watch has every step.");
    if (entry.chart.left_out) notes.push(`${entry.chart.left_out.toLocaleString("en")} shorter pieces are left out.`);
    entry.aside.textContent = notes.join(" ");
    delete option.height; delete option.aside;
    if (!entry.drawn) {
      entry.drawn = charts.init(entry.plot);
      if (entry.chart.key && data.live) entry.drawn.on("datazoom", () => zoomed(entry));
    }
    entry.drawn.setOption(option, { notMerge: true });
  }

  const seen = new IntersectionObserver((entries) => {
    for (const e of entries) {
      const entry = state.drawn.find((x) => x.plot === e.target);
      if (e.isIntersecting && entry && !entry.drawn) paint(entry);
    }
  }, { rootMargin: "300px" });

  const sized = new ResizeObserver((entries) => {
    for (const e of entries) state.drawn.find((x) => x.plot === e.target)?.drawn?.resize();
  });

  let asked = 0;
  async function zoomed(entry) {
    const zoom = entry.drawn.getOption().dataZoom[0], mine = ++asked;
    await new Promise((done) => setTimeout(done, 200));
    if (mine !== asked || !entry.chart.thinned) return;
    try {
      const path = `api/runs/${encodeURIComponent(state.name)}/series?first=${Math.floor(zoom.startValue)}&last=${Math.ceil(zoom.endValue)}`;
      const found = (await ask(path)).find((c) => c.key === entry.chart.key);
      if (found) entry.drawn.setOption({ series: found.series.map((s) => ({ name: s.name, data: s.x.map((x, k) => [x, s.y[k]]) })) });
    } catch (error) { problem(error); }
  }

  function clear() {
    for (const entry of state.drawn) { seen.unobserve(entry.plot); sized.unobserve(entry.plot); entry.drawn?.dispose(); }
    state.drawn = [];
  }

  function part(section) {
    const entries = section.charts.map(chartOf);
    return el("section", { class: "part", id: section.id, "aria-labelledby": `${section.id}-title` },
      el("h2", { id: `${section.id}-title` }, section.title),
      section.note ? el("p", { class: "note" }, section.note) : null,
      entries.length ? el("div", { class: "charts" }, ...entries.map((e) => e.node)) : null,
      section.tables.length > 3
        ? el("details", {}, el("summary", {}, `${section.title}: ${section.tables.length} tables`), ...section.tables.map(table))
        : null,
      ...(section.tables.length > 3 ? [] : section.tables.map(table)));
  }

  function watchCharts() {
    for (const entry of state.drawn) { seen.observe(entry.plot); sized.observe(entry.plot); }
  }

  // ---- a run

  function head(run) {
    const kind = run.good === true ? "good" : run.status === "running" ? "going" : run.good === false || run.status === "stopped" ? "bad" : "";
    return el("div", { class: "head" },
      el("h1", { tabindex: "-1" }, run.title, " ", el("span", { class: `status ${kind}` }, run.status)),
      el("p", { class: "verdict" }, run.verdict.join("; ") || "nothing measured yet"),
      run.subtitle ? el("p", { class: "subtitle" }, run.subtitle) : null,
      el("ul", { class: "tiles" }, ...run.tiles.map((t) => el("li", {}, el("strong", {}, t.value), el("span", {}, t.label)))));
  }

  function show(run, beside) {
    const kept = { top: scrollY, open: new Set([...document.querySelectorAll("details[open] > summary")].map((s) => s.textContent)), focus: document.activeElement?.id };
    clear();
    const decision = beside.filter((s) => s.id.startsWith("decide")).at(-1);
    const sections = [...(run?.sections ?? []), ...beside];
    const nodes = [];
    if (run) nodes.push(head(run));
    if (decision) nodes.push(el("p", { class: "decision" }, decision.note));
    nodes.push(el("nav", { "aria-label": "Parts of this page" }, el("ul", { class: "jump" }, ...sections.map((s) => el("li", {}, el("a", { href: `#${s.id}` }, s.title))))));
    nodes.push(...sections.map(part));
    if (run?.missing.length) nodes.push(el("p", { class: "aside" }, `Not there, so not shown: ${run.missing.join(", ")}.`));
    $("content").replaceChildren(...nodes);
    for (const s of document.querySelectorAll("details > summary")) if (kept.open.has(s.textContent)) s.parentElement.open = true;
    watchCharts();
    scrollTo({ top: kept.top, behavior: "instant" });
  }

  async function open(name, byUser = false) {
    state.overlay = false;
    if (byUser) { state.version = ""; history.replaceState(null, "", `#run=${encodeURIComponent(name)}`); }
    state.name = name;
    list();
    try {
      const run = data.live ? await ask(`api/runs/${encodeURIComponent(name)}?version=${encodeURIComponent(state.version)}`) : data.details[name];
      if (run === null || state.name !== name) return;
      if (run.version === state.version && run.version) { headOnly(run); return; }
      state.version = run.version;
      problem(null);
      if (byUser) scrollTo({ top: 0, behavior: "instant" });
      show(run, data.artifacts);
      if (byUser) document.querySelector("h1")?.focus();
    } catch (error) { problem(error); }
  }

  function headOnly(run) {
    const old = document.querySelector(".head");
    if (old && !old.contains(document.activeElement)) old.replaceWith(head(run));
  }

  // ---- the list

  function list() {
    const words = $("filter").value.toLowerCase().split(/\s+/).filter(Boolean), order = $("order").value;
    const said = (r) => `${r.name} ${r.store ?? ""} ${r.status} ${r.rank ?? ""}`.toLowerCase();
    const down = order === "f1" || order === "tokens_per_s" || order === "updated";
    const chosen = data.runs.filter((r) => words.every((w) => said(r).includes(w)));
    chosen.sort((a, b) => {
      if (order === "name") return a.name.localeCompare(b.name);
      const x = a[order], y = b[order];
      if (x === null || x === undefined) return y === null || y === undefined ? a.name.localeCompare(b.name) : 1;
      if (y === null || y === undefined) return -1;
      return down ? y - x : x - y;
    });
    $("count").textContent = chosen.length === data.runs.length ? `${data.runs.length} runs` : `${chosen.length} of ${data.runs.length} runs`;
    const focus = document.activeElement?.dataset?.run, focusKind = document.activeElement?.tagName;
    $("runs").replaceChildren(...chosen.map((r) => el("li", {},
      el("span", { class: "tick" }, el("input", { type: "checkbox", "aria-label": `compare ${r.name}`, "data-run": r.name, checked: state.ticked.has(r.name), onchange: (e) => { state.ticked[e.target.checked ? "add" : "delete"](r.name); ticks(); } })),
      el("button", { type: "button", "data-run": r.name, "aria-current": String(r.name === state.name && !state.overlay), onclick: () => open(r.name, true) },
        el("span", { class: "name" }, r.name),
        el("span", { class: "facts" }, `${r.status}${r.step ? `, step ${figure(r.step)}${r.steps ? ` of ${figure(r.steps)}` : ""}` : ""}`),
        el("span", { class: "facts" }, [r.loss === null ? null : `loss ${figure(r.loss)}`, r.f1 === null ? null : `F1 ${figure(r.f1)}`, r.note || null].filter(Boolean).join(", "))))));
    if (focus) [...$("runs").querySelectorAll(focusKind.toLowerCase())].find((n) => n.dataset.run === focus)?.focus();
    ticks();
  }

  function ticks() {
    $("overlay").disabled = state.ticked.size < 2;
    $("overlay").textContent = state.ticked.size < 2 ? "Tick two or more runs to compare their losses" : `Compare the losses of ${state.ticked.size} runs`;
  }

  async function overlay() {
    try {
      const names = [...state.ticked];
      const found = await Promise.all(names.map((n) => (data.live ? ask(`api/runs/${encodeURIComponent(n)}`) : data.details[n])));
      const rows = [], series = [];
      found.forEach((run, k) => {
        const chart = run.sections.find((s) => s.id === "training")?.charts.find((c) => c.key === "loss");
        if (!chart) return;
        const s = chart.series.at(-1);
        series.push({ name: names[k], x: s.x, y: s.y });
        const row = chart.table.rows.at(-1);
        rows.push([names[k], row[1], row[2], row[3], row[5]]);
      });
      state.overlay = true;
      list();
      clear();
      const chart = { kind: "lines", title: "Loss per label token, running means", unit: "", x_name: "step", zero: false, key: "", thinned: false, series,
        table: { head: ["run", "values", "first", "least", "last"], rows, numeric: [1, 2, 3, 4], facts: false, caption: "" } };
      $("content").replaceChildren(el("div", { class: "head" }, el("h1", { tabindex: "-1" }, `${series.length} runs`)),
        part({ id: "overlay-part", title: "Losses", note: "", charts: [chart], tables: [] }));
      watchCharts();
      document.querySelector("h1").focus();
    } catch (error) { problem(error); }
  }

  // ---- theme, live, start

  const dark = matchMedia("(prefers-color-scheme: dark)");
  function theme(name) {
    document.documentElement.dataset.theme = name;
    $("theme").setAttribute("aria-pressed", String(name === "dark"));
    for (const entry of state.drawn) if (entry.drawn) paint(entry);
  }
  let chosen = null;
  try { chosen = localStorage.getItem("lamella-theme"); } catch { /* a file page may have no storage */ }
  theme(chosen || (dark.matches ? "dark" : "light"));
  dark.addEventListener("change", () => { if (!chosen) theme(dark.matches ? "dark" : "light"); });
  $("theme").addEventListener("click", () => {
    chosen = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    try { localStorage.setItem("lamella-theme", chosen); } catch { /* as above */ }
    theme(chosen);
  });

  async function beat() {
    try {
      const tree = await ask("api/runs");
      data.runs = tree.runs;
      if (tree.artifacts_version !== state.artifacts) {
        data.artifacts = await ask("api/artifacts");
        state.artifacts = tree.artifacts_version;
        state.version = "";
      }
      first();
      list();
      const current = data.runs.find((r) => r.name === state.name);
      if (state.name && !state.overlay) await open(state.name);
      const going = data.runs.filter((r) => r.status === "running").length;
      $("live").replaceChildren(el("span", { class: "beat", "aria-hidden": "true" }), `live${going ? `: ${going} running` : ""}${current?.status === "running" ? `, step ${figure(current.step)}` : ""}`);
    } catch (error) {
      $("live").textContent = "no answer from lamella watch";
      if (!(error instanceof TypeError)) problem(error);
    }
    setTimeout(beat, document.hidden ? 5 * EVERY_MS : EVERY_MS);
  }

  function first() {
    document.body.classList.toggle("single", data.runs.length < 2);
    if (state.name && data.runs.some((r) => r.name === state.name)) return;
    const asked = decodeURIComponent((location.hash.match(/^#run=(.*)$/) || [])[1] || "");
    const newest = [...data.runs].sort((a, b) => (b.updated ?? 0) - (a.updated ?? 0))[0];
    state.name = data.runs.find((r) => r.name === asked)?.name ?? newest?.name ?? null;
    if (!state.name) show(null, data.artifacts);
  }

  $("where").textContent = data.folder;
  $("filter").addEventListener("input", list);
  $("order").addEventListener("change", list);
  $("overlay").addEventListener("click", overlay);
  if (data.live) beat();
  else { first(); list(); if (state.name) open(state.name); }
})();
