// `make web`: writes lamella/report/static/charts.js; the package itself needs no Node.
import { build } from "esbuild";
import { readFileSync, writeFileSync } from "node:fs";

const out = "../lamella/report/static/charts.js";
const { version } = JSON.parse(readFileSync("node_modules/echarts/package.json", "utf8"));
await build({ entryPoints: ["charts.js"], bundle: true, minify: true, format: "iife", globalName: "charts",
  target: "es2020", legalComments: "none", outfile: out });
const head = `/* Apache ECharts ${version} (Apache-2.0, copyright The Apache Software Foundation) with zrender (BSD-3-Clause,\n`
  + `   copyright Baidu Inc.) and tslib (0BSD); see NOTICE.txt. Made by \`make web\`. */\n`;
writeFileSync(out, head + readFileSync(out, "utf8").replaceAll("</script", "<\\/script"));
