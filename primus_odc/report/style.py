"""The page's style sheet. Colours are those of Okabe and Ito, which stay apart for colour-blind readers, in a light and a dark setting."""

STYLE = """
:root { color-scheme: light dark;
  --ground: #ffffff; --panel: #f6f7f9; --ink: #1c2430; --faint: #5d6978; --rule: #dfe3e8; --worse: #b3261e; --better: #00734f;
  --s0: #d55e00; --s1: #0072b2; --s2: #009e73; --s3: #b05f8e; --s4: #a67c00; --ideal: #7b8694;
  --forward: #a9bdd3; --backward: #5f7f9f; --wait: #d55e00; --wait-ground: #fde5d2;
  --communication: #e0a100; --settle: #8e6bb0; --publish: #c58bb5;
  --optimizer: #4a5563; --idle: #aab3be; --idle-ground: #f0f2f5; }
@media (prefers-color-scheme: dark) { :root {
  --ground: #12161c; --panel: #1a2029; --ink: #e6eaf0; --faint: #9aa7b6; --rule: #303945; --worse: #ff8a75; --better: #4fd6a5;
  --s0: #f08a3c; --s1: #56b4e9; --s2: #2fc598; --s3: #d68fb8; --s4: #e0b93f; --ideal: #8f9bab;
  --forward: #6d8bab; --backward: #40618a; --wait: #f08a3c; --wait-ground: #4a2c14;
  --communication: #e6b422; --settle: #a98bd0; --publish: #c58bb5;
  --optimizer: #c3ccd8; --idle: #55606e; --idle-ground: #1f262f; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); line-height: 1.5;
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Noto Sans", sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 40px 24px 64px; }
h1 { font-size: 30px; line-height: 1.2; letter-spacing: -0.015em; margin: 0 0 6px; }
h2 { font-size: 19px; margin: 0 0 4px; letter-spacing: -0.005em; }
section { margin-top: 44px; min-width: 0; }
p { margin: 0 0 10px; max-width: 74ch; }
.lead, .caption { color: var(--faint); }
.caption { font-size: 14px; margin-bottom: 16px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(190px, 1fr)); gap: 12px; margin: 26px 0 0; }
.tile { background: var(--panel); border-radius: 10px; padding: 14px 16px; }
.tile b { display: block; font-size: 30px; line-height: 1.2; font-weight: 650;
  font-variant-numeric: tabular-nums; letter-spacing: -0.01em; }
.tile span { display: block; font-size: 13.5px; color: var(--faint); }
.tile.better b { color: var(--better); } .tile.worse b { color: var(--worse); }
.said { margin: 24px 0 0; padding: 0 0 0 20px; } .said li { margin-bottom: 5px; max-width: 84ch; }
.pair { display: grid; grid-template-columns: minmax(0, 1fr) minmax(0, 1fr); gap: 44px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14.5px; font-variant-numeric: tabular-nums; }
th, td { padding: 7px 0 7px 18px; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--rule); }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
thead th { font-weight: 500; color: var(--faint); font-size: 13px; } tbody th { font-weight: 600; }
tr.ideal td, tr.ideal th { color: var(--faint); font-weight: 400; }
.key { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 8px; }
dl { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: 4px 22px; margin: 0; font-size: 14.5px; }
dl.notes { margin-top: 16px; font-size: 14px; } dt { color: var(--faint); } dd { margin: 0; overflow-wrap: anywhere; }
code { font: 13.5px ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
svg { display: block; width: 100%; height: auto; overflow: visible; }
.narrow { display: none; }
svg text { font: 12px system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif;
  fill: var(--ink); font-variant-numeric: tabular-nums; }
svg .tick, svg .axis-title, svg .faint { fill: var(--faint); } svg .strong { font-weight: 600; }
svg .halo { paint-order: stroke; stroke: var(--ground); stroke-width: 4px; stroke-linejoin: round; }
svg .grid { stroke: var(--rule); stroke-width: 1; } svg .over { opacity: 0.6; }
svg .bound { stroke: var(--faint); stroke-width: 1; stroke-dasharray: 3 4; } svg .link { stroke: var(--faint); stroke-width: 1; }
svg .s0 { --c: var(--s0); } svg .s1 { --c: var(--s1); } svg .s2 { --c: var(--s2); } svg .s3 { --c: var(--s3); } svg .s4 { --c: var(--s4); }
svg .s-ideal { --c: var(--ideal); }
.key.s0 { background: var(--s0); } .key.s1 { background: var(--s1); } .key.s2 { background: var(--s2); } .key.s3 { background: var(--s3); }
.key.s4 { background: var(--s4); } .key.s-ideal { background: var(--ideal); }
svg .fill { fill: var(--c); } svg .dot { fill: var(--c); fill-opacity: 0.6; } svg .box { fill: var(--c); fill-opacity: 0.22; }
svg .median { stroke: var(--c); stroke-width: 2.5; }
svg .line { fill: none; stroke: var(--c); stroke-linejoin: round; }
svg .thick { stroke-width: 6; stroke-opacity: 0.38; }
svg .dashed { stroke-width: 2.6; stroke-dasharray: 7 5; } svg .thin { stroke-width: 1.3; }
svg .saved { fill: var(--better); fill-opacity: 0.42; }
svg .added { fill: var(--worse); fill-opacity: 0.8; } svg .left { fill: var(--ideal); fill-opacity: 0.4; }
svg .saved-text { fill: var(--better); font-weight: 600; } svg .added-text { fill: var(--worse); font-weight: 600; }
svg .k-forward { fill: var(--forward); } svg .k-backward { fill: var(--backward); } svg .k-communication { fill: var(--communication); }
svg .k-settle { fill: var(--settle); } svg .k-publish { fill: var(--publish); } svg .k-optimizer { fill: var(--optimizer); }
svg .k-wait-ground { fill: var(--wait-ground); } svg .k-wait-line { stroke: var(--wait); stroke-width: 3.4; }
svg .k-idle-ground { fill: var(--idle-ground); } svg .k-idle-line { stroke: var(--idle); stroke-width: 1.2; }
svg .microbatch { stroke: var(--ground); stroke-width: 1.6; } svg .end { stroke: var(--ink); stroke-width: 1.4; }
@media (max-width: 760px) {
  main { padding: 24px 16px 48px; } h1 { font-size: 25px; } .pair { grid-template-columns: minmax(0, 1fr); }
  .wide { display: none; } .narrow { display: block; } .tiles { grid-template-columns: 1fr 1fr; } .tile b { font-size: 24px; }
  dl { grid-template-columns: minmax(0, 1fr); gap: 0; } dd { margin-bottom: 8px; } }
@media print { .tile { border: 1px solid var(--rule); } section { break-inside: avoid; } }
"""
