// Package picture draws charts as SVG text: lines, bars and heat maps, with
// titled axes, units, ticks and a legend. The same data give the same bytes.
// Nothing is fetched when it is shown: no script, no font, no style sheet.
package picture
