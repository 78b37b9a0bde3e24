package subjects_test

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	gotoken "go/token"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/rollbus/rollbus/subjects"
)

var update = flag.Bool("update", false, "write schema/rollout.json anew from the types")

// limits are what types cannot say; the decoder enforces the same.
var limits = map[string]map[string]any{
	"Request":                    {"required": []string{"id", "job", "sampling_params"}, "oneOf": []any{req("prompt_token_ids"), req("prompt"), req("messages")}, "additionalProperties": true},
	"Request.schema_version":     {"const": subjects.SchemaVersion},
	"Request.id":                 tokenLimit,
	"Request.job":                tokenLimit,
	"Request.reader":             tokenLimit,
	"Request.prompt_token_ids":   {"minItems": 1},
	"Request.prompt":             {"minLength": 1},
	"Request.messages":           {"type": "array", "minItems": 1, "items": map[string]any{"type": "object"}},
	"Request.max_attempts":       {"minimum": 0, "maximum": subjects.MaxAttemptsLimit},
	"Request.expected_tokens":    {"minimum": 0, "maximum": subjects.MaxTokenCount},
	"Request.step":               {"minimum": 0},
	"SamplingParams":             {"anyOf": []any{req("max_tokens"), req("max_new_tokens")}, "additionalProperties": true},
	"SamplingParams.max_tokens":  {"minimum": 1, "maximum": subjects.MaxTokenCount},
	"SamplingParams.temperature": {"minimum": 0, "maximum": 100},
	"SamplingParams.top_p":       {"exclusiveMinimum": 0, "maximum": 1},
	"SamplingParams.min_p":       {"minimum": 0, "maximum": 1},
	"SamplingParams.top_k":       {"minimum": -1},
	"SamplingParams.logprobs":    {"minimum": -1},
	"SamplingParams.stop":        {"maxItems": subjects.MaxStops},
	"Group":                      {"required": []string{"id"}},
	"Group.id":                   {"minLength": 1, "maxLength": subjects.MaxString},
	"Group.index":                {"minimum": 0},
	"Group.size":                 {"minimum": 0},
	"Trajectory.id":              {"minLength": 1, "maxLength": subjects.MaxString},
	"Trajectory.turn":            {"minimum": 1},
	"Resume.token_ids":           {"minItems": 1},
	"Return":                     {"additionalProperties": true},
	"Result.status": {"enum": []subjects.Status{subjects.Completed, subjects.Truncated, subjects.Aborted, subjects.Failed,
		subjects.Cancelled, subjects.Expired, subjects.Stale, subjects.Rejected}},
	"ResultError.class": {"enum": []string{subjects.ClassInfra, subjects.ClassData}},
}

var tokenLimit = map[string]any{"pattern": "^[a-z0-9-][a-z0-9_-]{0,127}$"}

func req(name string) any { return map[string]any{"required": []string{name}} }

// generate writes the schema of the types, with their comments.
func generate(t *testing.T) []byte {
	t.Helper()
	g := generator{docs: comments(t), defs: map[string]any{}}
	g.ref(reflect.TypeFor[subjects.Request]())
	g.ref(reflect.TypeFor[subjects.Result]())
	b, err := json.MarshalIndent(map[string]any{
		"$schema":     "https://json-schema.org/draft/2020-12/schema",
		"title":       "rollbus messages",
		"description": fmt.Sprintf("Version %d. A request is $defs/Request, a result $defs/Result. Unknown fields of a request and of its sampling_params go to the engine unchanged.", subjects.SchemaVersion),
		"anyOf":       []any{map[string]any{"$ref": "#/$defs/Request"}, map[string]any{"$ref": "#/$defs/Result"}},
		"$defs":       g.defs,
	}, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	return append(b, '\n')
}

type generator struct {
	docs map[string]string
	defs map[string]any
}

func (g *generator) ref(t reflect.Type) map[string]any {
	name := t.Name()
	if _, done := g.defs[name]; !done {
		g.defs[name] = nil // recursion ends here
		g.defs[name] = g.object(t)
	}
	return map[string]any{"$ref": "#/$defs/" + name}
}

func (g *generator) object(t reflect.Type) map[string]any {
	props := map[string]any{}
	var required []string
	for f := range t.Fields() {
		tag, opts, _ := strings.Cut(f.Tag.Get("json"), ",")
		if tag == "" || tag == "-" {
			continue
		}
		p := g.schema(f.Type)
		if !strings.Contains(opts, "omitempty") {
			if f.Type.Kind() == reflect.Pointer {
				p = map[string]any{"anyOf": []any{p, map[string]any{"type": "null"}}}
			}
			required = append(required, tag)
		}
		if d := g.docs[t.Name()+"."+f.Name]; d != "" {
			p["description"] = d
		}
		maps.Copy(p, limits[t.Name()+"."+tag])
		props[tag] = p
	}
	out := map[string]any{"type": "object", "properties": props, "description": g.docs[t.Name()]}
	if len(required) > 0 {
		out["required"] = required
	}
	maps.Copy(out, limits[t.Name()])
	if t == reflect.TypeFor[subjects.SamplingParams]() {
		delete(out, "required")
		alias := map[string]any{"description": "another name of max_tokens"}
		for k, v := range props["max_tokens"].(map[string]any) {
			if k != "description" {
				alias[k] = v
			}
		}
		props["max_new_tokens"] = alias
	}
	return out
}

func (g *generator) schema(t reflect.Type) map[string]any {
	switch t {
	case reflect.TypeFor[subjects.Duration]():
		return map[string]any{"anyOf": []any{
			map[string]any{"type": "string", "pattern": `^([0-9]+(\.[0-9]+)?(ns|us|µs|ms|s|m|h))+$|^0$`},
			map[string]any{"type": "number", "minimum": 0},
		}}
	case reflect.TypeFor[json.RawMessage]():
		return map[string]any{}
	}
	switch t.Kind() {
	case reflect.Pointer:
		return g.schema(t.Elem())
	case reflect.Struct:
		return g.ref(t)
	case reflect.Slice:
		return map[string]any{"type": "array", "items": g.schema(t.Elem())}
	case reflect.Map:
		return map[string]any{"type": "object", "additionalProperties": g.schema(t.Elem())}
	case reflect.String:
		return map[string]any{"type": "string"}
	case reflect.Bool:
		return map[string]any{"type": "boolean"}
	case reflect.Float64:
		return map[string]any{"type": "number"}
	case reflect.Uint32:
		return map[string]any{"type": "integer", "minimum": 0, "maximum": 1<<32 - 1}
	case reflect.Int, reflect.Int64:
		return map[string]any{"type": "integer"}
	}
	panic("no schema for " + t.String())
}

// comments reads "Type" and "Type.Field" from the sources.
func comments(t *testing.T) map[string]string {
	t.Helper()
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	docs := map[string]string{}
	for _, name := range files {
		f, err := parser.ParseFile(gotoken.NewFileSet(), name, nil, parser.ParseComments)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range f.Decls {
			gen, ok := d.(*ast.GenDecl)
			if !ok {
				continue
			}
			for _, s := range gen.Specs {
				ts, ok := s.(*ast.TypeSpec)
				if !ok {
					continue
				}
				docs[ts.Name.Name] = text(gen.Doc)
				st, ok := ts.Type.(*ast.StructType)
				if !ok {
					continue
				}
				for _, field := range st.Fields.List {
					for _, n := range field.Names {
						d := text(field.Comment)
						if field.Comment == nil && len(field.Names) == 1 && !strings.HasPrefix(text(field.Doc), "Exactly one") {
							d = text(field.Doc)
						}
						docs[ts.Name.Name+"."+n.Name] = d
					}
				}
			}
		}
	}
	return docs
}

func text(c *ast.CommentGroup) string { return strings.Join(strings.Fields(c.Text()), " ") }

func TestTheSchemaIsTheOneOfTheTypes(t *testing.T) {
	const file = "schema/rollout.json"
	want := generate(t)
	if *update {
		if err := os.WriteFile(file, want, 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if !bytes.Equal(subjects.Schema(), want) {
		t.Errorf("%s is not in step with the types: run go test ./subjects -run Schema -update and look at the difference", file)
	}
}
