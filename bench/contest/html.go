package contest

import (
	"html/template"
	"io"
)

// WriteHTML writes the report as one page that needs nothing else: the
// conclusion, the targets, the table, the pictures.
func (r *Report) WriteHTML(w io.Writer) error {
	type shown struct {
		SVG      template.HTML
		Sentence string
	}
	page := struct {
		*Report
		Head   []string
		Body   [][]string
		Shown  []shown
		Method []string
	}{Report: r, Method: method}
	for _, c := range r.Columns {
		page.Head = append(page.Head, FigureName(c))
	}
	for _, row := range r.Contenders {
		cells := []string{row.Name, row.Kind, row.Setting}
		for _, c := range r.Columns {
			cells = append(cells, FigureText(c, row.Figures[c]))
		}
		page.Body = append(page.Body, cells)
	}
	for _, p := range r.Pictures {
		page.Shown = append(page.Shown, shown{template.HTML(p.SVG), p.Sentence}) //nolint:gosec // made by package picture, which escapes every text
	}
	return pageTemplate.Execute(w, page)
}

var method = []string{
	"Simulated in virtual time: the production decision core and a model of the bus for our policies, routers that decide on arrival for the baselines, the same engine model under both. Engine times are modelled, not measured on a GPU.",
	"± is the half width of the 95 % confidence interval of the mean over the seeds (Student's t). Ratios are taken seed by seed.",
	"Baselines run in the best of three settings, chosen on seeds that are not measured; our policies run with their defaults.",
}

var pageTemplate = template.Must(template.New("report").Parse(`<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>rollbus bench {{.Bench}}</title>
<style>
body{font:15px/1.45 sans-serif;max-width:1100px;margin:2em auto;padding:0 1em;color:#222;background:#fff}
table{border-collapse:collapse;margin:1em 0;font-size:13px}td,th{border:1px solid #ccc;padding:3px 8px;text-align:left}
th{background:#f3f3f3}.no{color:#a00;font-weight:bold}.yes{color:#060}figure{margin:1.2em 0}figcaption{color:#444}svg{max-width:100%;height:auto}
</style></head><body>
<h1>rollbus bench {{.Bench}}{{if .Quick}} (quick){{end}}</h1>
<p>{{.Workload}}. {{.Seeds}} seed(s).</p>
<p><strong>{{.Conclusion}}</strong></p>
{{if .Targets}}<h2>Targets</h2><table><tr><th>target</th><th>want</th><th>measured</th><th>±</th><th>holds</th><th>reason</th></tr>
{{range .Targets}}<tr><td>{{.Name}}</td><td>{{.Want}}</td><td>{{.Got}}</td><td>{{.CI95}}</td><td>{{if .Met}}<span class="yes">yes</span>{{else}}<span class="no">no</span>{{end}}</td><td>{{.Why}}</td></tr>
{{end}}</table>{{end}}
<h2>Contenders</h2><table><tr><th>contender</th><th>kind</th><th>setting</th>{{range .Head}}<th>{{.}}</th>{{end}}</tr>
{{range .Body}}<tr>{{range .}}<td>{{.}}</td>{{end}}</tr>
{{end}}</table>
{{range .Shown}}<figure>{{.SVG}}<figcaption>{{.Sentence}}</figcaption></figure>
{{end}}<h2>How</h2><ul>{{range .Method}}<li>{{.}}</li>{{end}}{{range .Notes}}<li>{{.}}</li>{{end}}</ul>
</body></html>
`))
