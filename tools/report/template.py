"""The template of a report: one page without scripts, and without anything from elsewhere."""

TEMPLATE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ record.model }}: piecegraph</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1d2433; }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.1rem; margin-top: 2.2rem; }
table { border-collapse: collapse; } th, td { text-align: left; padding: .15rem 1.2rem .15rem 0; vertical-align: top; }
th { font-weight: 600; } td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
tbody tr { border-top: 1px solid #e3e6ec; } .quiet { color: #667085; } svg { width: 100%; height: auto; }
.track { background: #f1f3f7; width: 22rem; height: .9rem; } .bar { background: #4666d0; height: 100%; }
.FULL { fill: #4666d0; } .PIECEWISE { fill: #7fb07a; } .NONE { fill: #d99a4e; }
.key span { display: inline-block; width: .8rem; height: .8rem; margin: 0 .3rem 0 1rem; }
@media (prefers-color-scheme: dark) {
 body { background: #14171f; color: #e4e7ee; } tbody tr { border-color: #2b3040; } .track { background: #232838; }
}
</style>
</head>
<body>
<h1>{{ record.model }}</h1>
<p class="quiet">{{ record.model_class }}, {{ parameters }} parameters, {{ record.dtype }} on {{ record.device }}
{%- if record.is_assumed %} (assumed){% endif %}. piecegraph {{ version }}.</p>
{% macro chart(rows, unit) %}
<table><tbody>
{% for bar in rows %}<tr><th>{{ bar.name }}</th><td class="number">{{ unit(bar.value) }}</td>
<td><div class="track"><div class="bar"
 style="margin-left: {{ '%.2f' % bar.begin }}%; width: {{ '%.2f' % bar.length }}%"></div></div></td></tr>
{% endfor %}</tbody></table>
{% endmacro %}
<h2>What is slower than asked for</h2>
{% if slower %}<ul>{% for line in slower %}<li>{{ line }}</li>{% endfor %}</ul>
{% else %}<p>Nothing: every batch runs as asked for.</p>{% endif %}
{% if record.notes %}<h2>Notes</h2><ul>{% for line in record.notes %}<li>{{ line }}</li>{% endfor %}</ul>{% endif %}
<h2>Pieces</h2>
<p>{{ record.report.num_pieces }} pieces, {{ record.report.num_unique_pieces }} of them unique, cut at
{{ record.report.num_split_ops }} split ops; compiled by {{ record.compiler }}.</p>
<table><thead><tr><th class="number">unique piece</th><th class="number">used by</th><th class="number">graph nodes</th>
<th>runs eagerly</th></tr></thead><tbody>
{% for row in record.report.unique_pieces %}<tr><td class="number">{{ row.index }}</td>
<td class="number">{{ row.shared_by }}</td><td class="number">{{ row.num_nodes }}</td>
<td>{{ record.eager_pieces.get(row.index) or record.eager_pieces.get(row.index | string) or '' }}</td></tr>
{% endfor %}</tbody></table>
{% if record.split_ops %}<table><thead><tr><th>split op</th><th class="number">calls</th><th>replayed as</th><th></th>
</tr></thead><tbody>
{% for row in record.split_ops %}<tr><td>{{ row.op }}</td><td class="number">{{ row.calls }}</td><td>{{ row.cost }}</td>
<td>{{ row.note }}</td></tr>
{% endfor %}</tbody></table>{% endif %}
<h2>Passes</h2>
{% if record.report.passes %}<table><thead><tr><th>pass</th><th class="number">matches</th>
<th class="number">nodes removed</th><th>what was missed</th></tr></thead><tbody>
{% for row in record.report.passes %}<tr><td>{{ row.name }}</td><td class="number">{{ row.matches }}</td>
<td class="number">{{ row.nodes_removed }}</td><td>{{ missed(row) }}</td></tr>
{% endfor %}</tbody></table>{% else %}<p>None run.</p>{% endif %}
<h2>Attention</h2>
<p>Backend {{ record.backend }}.</p>
<ul>{% for line in record.backend_reasons %}<li>{{ line }}</li>{% endfor %}</ul>
<table><thead><tr><th class="number">layers</th><th class="number">query heads</th><th class="number">KV heads</th>
<th class="number">head size</th><th class="number">window</th></tr></thead><tbody>
{% for row in record.attention %}<tr><td class="number">{{ row.layers }}</td>
<td class="number">{{ row.num_q_heads }}</td>
<td class="number">{{ row.num_kv_heads }}</td><td class="number">{{ row.key_dim }}</td>
<td class="number">{{ row.window or '' }}</td></tr>
{% endfor %}</tbody></table>
<h2>Dispatch table</h2>
<p>{{ record.configured_mode }}: {{ record.num_full }} FULL and {{ record.num_piecewise }} PIECEWISE graphs to capture.
<span class="key"><span style="background: #4666d0"></span>FULL<span style="background: #7fb07a"></span>PIECEWISE<span
style="background: #d99a4e"></span>NONE</span></p>
{% for title, unit, steps, rows in tables if rows %}
<h3>{{ title }}</h3>
<svg viewBox="0 0 640 220" role="img" aria-label="{{ title }}: padded size by size of the batch">
{% for step in steps %}<rect class="{{ step.mode }}" x="{{ '%.2f' % step.x }}" y="{{ '%.2f' % step.y }}"
 width="{{ '%.2f' % step.width }}" height="{{ '%.2f' % step.height }}" stroke="white" stroke-width="0.5">
<title>{{ step.title }}</title></rect>
{% endfor %}</svg>
<p class="quiet">To the right: {{ unit }} of a batch, {{ rows[0].first }} to {{ rows[-1].last }}. Upwards: the size it
is padded to, up to {{ rows[-1].num_tokens or rows[-1].last }} tokens. Both scales are logarithmic.</p>
<details><summary>{{ rows | length }} ranges</summary>
<table><thead><tr><th>{{ unit }}</th><th>mode</th><th class="number">padded to</th><th>why</th></tr></thead><tbody>
{% for row in rows %}<tr><td>{{ row.first }}{% if row.last != row.first %} to {{ row.last }}{% endif %}</td>
<td>{{ row.mode }}</td><td class="number">{{ row.num_tokens or '' }}</td><td>{{ row.reason or '' }}</td></tr>
{% endfor %}</tbody></table></details>
{% endfor %}
{% if record.by_cost %}<h3>Batches that run under something cheaper than the smallest graph that fits</h3>
<table><thead><tr><th>tokens</th><th class="number">of each request</th><th>mode</th><th class="number">padded to</th>
<th class="number">measured</th><th>smallest graph</th><th class="number">measured</th></tr></thead><tbody>
{% for row in record.by_cost %}<tr><td>{{ row.first }}{% if row.last != row.first %} to {{ row.last }}{% endif %}</td>
<td class="number">{{ row.uniform_token_count or '' }}</td><td>{{ row.taken.mode }}</td>
<td class="number">{{ row.taken.num_tokens or '' }}</td>
<td class="number">{{ '%.3g ms' % (row.taken.seconds * 1000) }}</td>
<td>{{ row.instead_of.mode }} {{ row.instead_of.num_tokens }}</td>
<td class="number">{{ '%.3g ms' % (row.instead_of.seconds * 1000) }}</td></tr>
{% endfor %}</tbody></table>
{% endif %}<h2>Memory</h2>
{{ chart(memory, in_bytes) }}
<p class="quiet">A start measures what is left for the cache and what the graphs take; a text's cache grows with it.</p>
<h2>Timeline</h2>
<p class="quiet">The phases of this explanation, which traces, rewrites and splits as a cold start does, and compiles,
captures and loads nothing. <code>piecegraph bench startup</code> measures whole starts.</p>
{{ chart(phases, in_seconds) }}
</body>
</html>
"""
