// Chart objects of report/charts.py as options of ECharts. Colours: Okabe and Ito's, told apart by the colour-blind.
"use strict";

const draw = (() => {
  const LIGHT = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8a6d00", "#56b4e9", "#5d5a54", "#7b3294"];
  const DARK = ["#56b4e9", "#f0894a", "#3fc79a", "#e39bc4", "#f0e442", "#8fb8ff", "#a9a59d", "#c99bdd"];
  const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const palette = () => (document.documentElement.dataset.theme === "dark" ? DARK : LIGHT);

  function bytes(v) {
    for (const [size, unit] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) if (Math.abs(v) >= size) return `${trim(v / size)} ${unit}`;
    return `${trim(v)} B`;
  }
  const trim = (v) => (v === 0 ? "0" : Math.abs(v) >= 1e5 || Math.abs(v) < 1e-3 ? v.toExponential(1) : String(Number(v.toPrecision(3))));
  const say = (unit) => (v) => (v === null || v === undefined ? "-" : unit === "B" ? bytes(v) : unit === "share" ? `${trim(100 * v)} %` : unit === "s" ? `${trim(v)} s` : trim(v));

  function base(chart) {
    const ink = css("--ink"), soft = css("--soft"), line = css("--line");
    return {
      animation: !calm && chart.kind !== "lines", animationDuration: 250, color: palette(),
      textStyle: { color: ink, fontFamily: getComputedStyle(document.body).fontFamily },
      aria: { enabled: true, label: { description: `${chart.title}. The same figures stand in the table below.` }, decal: { show: chart.kind === "stack" } },
      tooltip: { confine: true, backgroundColor: css("--card"), borderColor: line, textStyle: { color: ink } },
      legend: { type: "scroll", top: 0, left: 0, textStyle: { color: ink }, inactiveColor: soft, pageTextStyle: { color: soft }, pageIconColor: ink },
      grid: { left: 8, right: 16, top: 34, bottom: 8, containLabel: true },
      axis: (more) => ({ axisLine: { lineStyle: { color: soft } }, axisLabel: { color: soft, hideOverlap: true }, nameTextStyle: { color: soft },
        splitLine: { lineStyle: { color: line } }, ...more }),
    };
  }

  function finish(o) { delete o.axis; return o; }

  const kinds = {
    lines(chart) {
      const o = base(chart), unit = say(chart.unit);
      o.legend.show = chart.series.length > 1;
      o.grid.top = chart.series.length > 1 ? 34 : 12;
      o.tooltip = { ...o.tooltip, trigger: "axis", valueFormatter: unit };
      o.xAxis = o.axis({ type: "value", min: "dataMin", max: "dataMax", name: chart.x_name, nameLocation: "middle", nameGap: 24, splitLine: { show: false } });
      o.grid.bottom = 28;
      o.yAxis = o.axis({ type: "value", scale: !chart.zero, axisLabel: { color: css("--soft"), formatter: unit } });
      if (chart.key) o.dataZoom = [{ type: "inside", filterMode: "none", zoomOnMouseWheel: "ctrl", moveOnMouseMove: true, minValueSpan: 2 }];
      o.series = chart.series.map((s, n) => ({
        name: s.name, type: "line", showSymbol: s.x.length < 40, symbolSize: 5, data: s.x.map((x, k) => [x, s.y[k]]), sampling: "lttb", connectNulls: true,
        lineStyle: { width: chart.series.length === 2 && n === 0 && chart.key === "loss" ? 1 : 2, opacity: chart.series.length === 2 && n === 0 && chart.key === "loss" ? .45 : 1,
          type: ["solid", "dashed", "dotted"][chart.key === "loss" ? 0 : Math.floor(n / 3) % 3] },
      }));
      return finish(o);
    },

    stack(chart) {
      const o = base(chart), unit = say(chart.unit);
      o.height = 90 + 44 * chart.rows.length;
      o.tooltip = { ...o.tooltip, trigger: "axis", axisPointer: { type: "shadow" }, valueFormatter: unit };
      o.xAxis = o.axis({ type: "value", max: chart.unit === "share" ? 1 : null, axisLabel: { color: css("--soft"), formatter: unit, hideOverlap: true } });
      o.yAxis = o.axis({ type: "category", data: chart.rows, inverse: true, axisLabel: { color: css("--ink"), width: 130, overflow: "truncate" } });
      o.series = chart.parts.map((p) => ({ name: p.name, type: "bar", stack: "all", barMaxWidth: 34, data: p.values }));
      const limits = chart.limits.map((v, k) => ({ v, k })).filter((x) => x.v !== null);
      const most = Math.max(...chart.rows.map((_, k) => chart.parts.reduce((sum, p) => sum + (p.values[k] || 0), 0)));
      if (limits.length) {
        const shown = limits.filter((x) => x.v <= 3 * most);
        o.series.push({ name: chart.limit_name, type: "scatter", symbol: "rect", symbolSize: [3, 34], itemStyle: { color: css("--bad") }, data: shown.map((x) => [x.v, x.k]) });
        if (shown.length < limits.length) o.aside = `${chart.limit_name} lies beyond the chart's right edge: see the table.`;
      }
      return finish(o);
    },

    dots(chart) {
      const o = base(chart), n = chart.series.length, unit = say("");
      o.legend.data = chart.series.map((s, k) => ({ name: s.name, icon: ["circle", "rect", "diamond"][k % 3] }));
      o.tooltip = { ...o.tooltip, trigger: "item", formatter: (p) => `${p.seriesName}, ${chart.groups[Math.round(p.value[1] - p.value[4])]}<br>${unit(p.value[0])}${p.value[2] === null ? "" : ` [${unit(p.value[2])}, ${unit(p.value[3])}]`}` };
      const least = Math.min(...chart.series.flatMap((s) => s.values.filter(Boolean).map((v) => v[1] ?? v[0])));
      o.xAxis = o.axis({ type: "value", min: least >= -.05 ? 0 : null, axisLine: { onZero: false, lineStyle: { color: css("--soft") } }, position: "bottom" });
      o.yAxis = o.axis({ type: "value", min: -.5, max: chart.groups.length - .5, inverse: true, interval: 1, axisLine: { show: false }, splitLine: { show: false }, axisTick: { show: false },
        axisLabel: { color: css("--ink"), formatter: (v) => (Number.isInteger(v) ? chart.groups[v] : ""), customValues: chart.groups.map((_, k) => k) } });
      o.series = chart.series.map((s, k) => {
        const shift = n > 1 ? (k / (n - 1) - .5) * .6 : 0;
        const data = s.values.map((t, g) => (t === null || t[0] === null ? null : [t[0], g + shift, t[1], t[2], shift])).filter(Boolean);
        return { name: s.name, type: "custom", data, encode: { x: [0, 2, 3], y: 1 }, clip: true, renderItem: (params, api) => {
          const [x, y] = api.coord([api.value(0), api.value(1)]), color = palette()[k % palette().length];
          const shape = ["circle", "rect", "diamond"][k % 3];
          const items = [];
          if (!Number.isNaN(api.value(2)) && data[params.dataIndex][2] !== null) {
            const a = api.coord([api.value(2), api.value(1)])[0], b = api.coord([api.value(3), api.value(1)])[0];
            items.push({ type: "line", shape: { x1: a, y1: y, x2: b, y2: y }, style: { stroke: color, lineWidth: 2, opacity: .75 } });
          }
          items.push(shape === "circle" ? { type: "circle", shape: { cx: x, cy: y, r: 5 }, style: { fill: color } }
            : shape === "rect" ? { type: "rect", shape: { x: x - 4.5, y: y - 4.5, width: 9, height: 9 }, style: { fill: color } }
            : { type: "polygon", shape: { points: [[x, y - 6], [x + 6, y], [x, y + 6], [x - 6, y]] }, style: { fill: color } });
          return { type: "group", children: items };
        } };
      });
      o.height = Math.max(220, 60 + chart.groups.length * Math.max(26, 13 * n));
      return finish(o);
    },

    pairs(chart) {
      const o = base(chart);
      o.legend.show = false;
      o.grid.top = 24;
      const far = Math.min(20, Math.max(1.5, ...chart.rows.map((r) => r.ratio))), low = Math.min(.5, ...chart.rows.map((r) => r.ratio || 1));
      o.tooltip = { ...o.tooltip, trigger: "axis", axisPointer: { type: "shadow" }, formatter: (p) => { const r = chart.rows[p[0].dataIndex]; return `${text(r.name)}<br>planned ${text(r.planned)}, measured ${text(r.measured)} (${r.ratio.toFixed(2)}x)`; } };
      o.xAxis = o.axis({ type: "log", min: Math.max(low * .9, .01), max: far * 1.1, axisLabel: { color: css("--soft"), formatter: (v) => `${trim(v)}x` } });
      o.yAxis = o.axis({ type: "category", inverse: true, data: chart.rows.map((r) => r.name), axisLabel: { color: css("--ink"), width: 190, overflow: "truncate" } });
      o.series = [{ type: "bar", barMaxWidth: 16, data: chart.rows.map((r) => ({ value: r.ratio, itemStyle: { color: Math.abs(Math.log(r.ratio)) < Math.log(1.1) ? palette()[2] : palette()[1] } })),
        markLine: { symbol: "none", silent: true, label: { formatter: "as planned", position: "start", color: css("--soft") }, lineStyle: { color: css("--ink") }, data: [{ xAxis: 1 }] } }];
      o.height = Math.max(180, 50 + 26 * chart.rows.length);
      return finish(o);
    },

    lanes(chart) {
      const o = base(chart);
      o.legend.data = chart.causes.map((name, k) => ({ name, itemStyle: { color: palette()[k % palette().length] } }));
      o.tooltip = { ...o.tooltip, trigger: "item", formatter: (p) => `${text(chart.spans[p.value[4]][4])}<br>${trim(1000 * (p.value[2] - p.value[1]))} ms` };
      const end = Math.max(...chart.spans.map((s) => s[2]));
      o.xAxis = o.axis({ type: "value", min: 0, max: end, axisLabel: { color: css("--soft"), formatter: (v) => `${trim(v)} s` } });
      o.yAxis = o.axis({ type: "category", data: chart.lanes, inverse: true, splitLine: { show: false }, axisLabel: { color: css("--ink"), width: 130, overflow: "truncate" } });
      o.dataZoom = [{ type: "inside", filterMode: "weakFilter", zoomOnMouseWheel: "ctrl" }, { type: "slider", filterMode: "weakFilter", height: 18, bottom: 4 }];
      o.grid.bottom = 36;
      o.series = chart.causes.map((name, c) => ({
        name, type: "custom", itemStyle: { color: palette()[c % palette().length] }, encode: { x: [1, 2], y: 0 }, clip: true,
        data: chart.spans.map((s, k) => [s[0], s[1], s[2], s[3], k]).filter((s) => s[3] === c),
        renderItem: (params, api) => {
          const a = api.coord([api.value(1), api.value(0)]), b = api.coord([api.value(2), api.value(0)]), h = api.size([0, 1])[1] * .6;
          return { type: "rect", shape: { x: a[0], y: a[1] - h / 2, width: Math.max(b[0] - a[0], .6), height: h }, style: { fill: api.visual("color") } };
        },
      }));
      o.height = 110 + 42 * chart.lanes.length;
      return finish(o);
    },

    // Disks above, hosts in the middle, devices below; dashed lines are rates that nobody measured.
    graph(chart) {
      const o = base(chart), row = { disk: 0, host: 1, cpu: 2, cuda: 2 }, rows = {};
      const groups = [...new Set(chart.nodes.map((n) => n.group))], place = new Map();
      chart.nodes.forEach((n) => { (rows[row[n.group] ?? 2] ??= []).push(n); });
      Object.entries(rows).forEach(([r, nodes]) => nodes.forEach((n, k) => place.set(n.name, [(k + .5) / nodes.length, Number(r)])));
      o.legend.show = false;
      o.grid = { left: 10, right: 10, top: 30, bottom: 50 };
      o.xAxis = { type: "value", min: 0, max: 1, show: false };
      o.yAxis = { type: "value", min: 0, max: 2, inverse: true, show: false };
      o.tooltip = { ...o.tooltip, trigger: "item", formatter: (p) => text(p.data.said) };
      const ink = css("--ink"), soft = css("--soft"), card = css("--card"), font = getComputedStyle(document.body).fontFamily;
      const links = chart.links.map((l) => ({ value: [...place.get(l.a), ...place.get(l.b)], said: `${l.a} to ${l.b}: ${l.label}${l.measured ? "" : " (assumed)"}`, link: l }));
      const nodes = chart.nodes.map((n) => ({ value: place.get(n.name), said: `${n.name}: ${n.text}`, node: n }));
      const narrow = innerWidth < 700;
      o.series = [
        { type: "custom", data: links, silent: false, renderItem: (params, api) => {
          const a = api.coord([api.value(0), api.value(1)]), b = api.coord([api.value(2), api.value(3)]), l = links[params.dataIndex].link;
          const level = Math.abs(a[1] - b[1]) < 1, sag = level ? 26 : 0, mid = [(a[0] + b[0]) / 2, (a[1] + b[1]) / 2 + sag / 2 + (level ? 6 : 0)];
          const shape = { x1: a[0], y1: a[1], x2: b[0], y2: b[1], cpx1: (a[0] + b[0]) / 2, cpy1: a[1] + sag + (level ? 12 : 0) };
          return { type: "group", children: [
            { type: level ? "bezierCurve" : "line", shape, style: { stroke: soft, fill: "none", lineWidth: 2, lineDash: l.measured ? null : [5, 4] } },
            ...(chart.links.length > 24 || (narrow && chart.links.length > 2) ? [] : [{ type: "text", x: mid[0], y: mid[1], style: { text: l.label, fill: ink, font: `12px ${font}`, align: "center", verticalAlign: "middle", backgroundColor: card, padding: [2, 5] } }]),
          ] };
        } },
        { type: "custom", data: nodes, renderItem: (params, api) => {
          const [x, y] = api.coord([api.value(0), api.value(1)]), n = nodes[params.dataIndex].node, fill = palette()[groups.indexOf(n.group) % palette().length];
          const up = n.group === "disk";
          const body = n.group === "host" ? { type: "rect", shape: { x: x - 26, y: y - 15, width: 52, height: 30, r: 6 }, style: { fill } }
            : up ? { type: "polygon", shape: { points: [[x, y - 15], [x + 18, y], [x, y + 15], [x - 18, y]] }, style: { fill } }
            : { type: "circle", shape: { cx: x, cy: y, r: 16 }, style: { fill } };
          const said = n.group === "host" ? { x: x + 34, y, align: "left", verticalAlign: "middle" } : up ? { x: x + 26, y, align: "left", verticalAlign: "middle" } : { x, y: y + 21, align: "center", verticalAlign: "top" };
          const label = narrow && chart.nodes.length > 6 ? n.name : `${n.name}\n${n.text}`;
          return { type: "group", children: [body, { type: "text", x: said.x, y: said.y, style: { text: label, fill: ink, font: `12px ${font}`, lineHeight: 16, align: said.align, verticalAlign: said.verticalAlign } }] };
        } },
      ];
      o.height = 380;
      return finish(o);
    },

    heat(chart) {
      const o = base(chart);
      o.legend.show = false;
      const most = Math.max(...chart.values.map((v) => v[2] ?? 0), 2);
      o.tooltip = { ...o.tooltip, formatter: (p) => `${text(chart.rows[p.value[1]])}, ${text(chart.columns[p.value[0]])}: ${trim(p.value[2])}` };
      o.xAxis = o.axis({ type: "category", data: chart.columns, splitLine: { show: false } });
      o.yAxis = o.axis({ type: "category", data: chart.rows, inverse: true, splitLine: { show: false }, axisLabel: { color: css("--ink"), width: 150, overflow: "truncate", interval: chart.rows.length > 40 ? "auto" : 0 } });
      o.visualMap = { min: 0, max: most, calculable: true, orient: "horizontal", left: "center", bottom: 0, textStyle: { color: css("--soft") }, inRange: { color: ["#fff7e0", "#f5b041", "#b03a2e", "#4a1024"] } };
      o.grid = { left: 8, right: 16, top: 8, bottom: 76, containLabel: true };
      o.series = [{ type: "heatmap", data: chart.values, progressive: 0 }];
      o.height = Math.min(900, 150 + 18 * chart.rows.length);
      return finish(o);
    },

    tornado(chart) {
      const o = base(chart);
      o.legend.data = ["at its low value", "at its high value"];
      o.tooltip = { ...o.tooltip, trigger: "axis", axisPointer: { type: "shadow" }, formatter: (p) => { const r = chart.rows[p[0].dataIndex]; return `${text(r.name)}<br>${text(r.low)}: ${trim(r.at_low)}<br>${text(r.high)}: ${trim(r.at_high)}`; } };
      o.xAxis = o.axis({ type: "value", axisLabel: { color: css("--soft"), formatter: (v) => trim(v + chart.base) } });
      o.yAxis = o.axis({ type: "category", data: chart.rows.map((r) => r.name), axisLabel: { color: css("--ink"), width: 180, overflow: "truncate" } });
      const bar = (name, key) => ({ name, type: "bar", barGap: "-100%", barMaxWidth: 20, data: chart.rows.map((r) => r[key] - chart.base) });
      o.series = [{ ...bar("at its low value", "at_low"), itemStyle: { color: palette()[0] } }, { ...bar("at its high value", "at_high"), itemStyle: { color: palette()[1] } }];
      o.height = 90 + 30 * chart.rows.length;
      return finish(o);
    },
  };

  function text(value) {
    const node = document.createElement("span");
    node.textContent = value;
    return node.innerHTML;
  }

  const WIDE = new Set(["lanes", "graph", "heat", "pairs", "tornado", "stack", "dots"]);
  return {
    option: (chart) => kinds[chart.kind](chart),
    wide: (chart) => WIDE.has(chart.kind) || (chart.kind === "lines" && chart.key === "loss"),
  };
})();
