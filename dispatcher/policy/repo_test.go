package policy_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

// pure are the packages of which live dispatch, shadow, simulation and replay
// run the same code: nothing in them may differ between machines or moments.
var pure = []string{".", "../prefix", "../core"}

// sources parses the files of a package, tests left out.
func sources(t *testing.T, fset *token.FileSet, dir string) []*ast.File {
	t.Helper()
	names, err := filepath.Glob(filepath.Join(dir, "*.go"))
	if err != nil || len(names) == 0 {
		t.Fatalf("%s: no Go files (%v)", dir, err)
	}
	var out []*ast.File
	for _, name := range names {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		f, err := parser.ParseFile(fset, name, nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, f)
	}
	return out
}

func TestTheCoreImportsNothingThatReachesOut(t *testing.T) {
	forbidden := []string{"net", "net/", "os", "os/", "github.com/nats-io/", "math/rand", "crypto/", "sync", "runtime", "unsafe", "context", "log"}
	for _, dir := range pure {
		fset := token.NewFileSet()
		for _, f := range sources(t, fset, dir) {
			for _, im := range f.Imports {
				path, err := strconv.Unquote(im.Path.Value)
				if err != nil {
					t.Fatal(err)
				}
				for _, bad := range forbidden {
					if path == strings.TrimSuffix(bad, "/") || strings.HasSuffix(bad, "/") && strings.HasPrefix(path, bad) || bad == "math/rand" && strings.HasPrefix(path, bad) {
						t.Errorf("%s imports %s", fset.Position(im.Pos()), path)
					}
				}
			}
		}
	}
}

// forbiddenCalls differ between moments or machines.
var forbiddenCalls = map[string][]string{
	"time": {"Now", "Since", "Until", "Sleep", "After", "AfterFunc", "Tick", "NewTimer", "NewTicker"},
	"math": {"Exp", "Exp2", "Expm1", "Pow", "Pow10", "Log", "Log2", "Log10", "Log1p", "FMA", "Sin", "Cos", "Tan", "Sinh", "Cosh", "Tanh", "Gamma", "Erf", "Cbrt", "Hypot"},
}

func TestTheCoreHasNoClockNoGoroutineAndNoInexactMathematics(t *testing.T) {
	for _, dir := range pure {
		fset := token.NewFileSet()
		for _, f := range sources(t, fset, dir) {
			ast.Inspect(f, func(n ast.Node) bool {
				switch n := n.(type) {
				case *ast.GoStmt:
					t.Errorf("%s: a goroutine", fset.Position(n.Pos()))
				case *ast.SelectStmt:
					t.Errorf("%s: a select", fset.Position(n.Pos()))
				case *ast.SelectorExpr:
					if x, ok := n.X.(*ast.Ident); ok {
						for _, name := range forbiddenCalls[x.Name] {
							if n.Sel.Name == name {
								t.Errorf("%s: %s.%s", fset.Position(n.Pos()), x.Name, name)
							}
						}
					}
				}
				return true
			})
		}
	}
}

// A product may be fused with a sum that uses it, also in a later statement, and
// then rounds differently on another machine; a conversion forbids that. So
// every product of floats stands in float64(...), or is the operand of another
// product, a quotient, a comparison or another conversion.
func TestNoProductOfFloatsCanBeFused(t *testing.T) {
	for _, dir := range pure {
		fset := token.NewFileSet()
		for _, where := range fusible(fset, sources(t, fset, dir)) {
			t.Errorf("%s: a product of floats that a sum may be fused with: write float64(x*y)", where)
		}
	}
}

func TestTheCheckForFusionFindsIt(t *testing.T) {
	const head = "package p\nfunc f(x, y, z float64, n int) float64 {\n"
	for body, want := range map[string]int{
		"return x*y + z":                        1,
		"t := x * y; return t + z":              1,
		"z += x * y; return z":                  1,
		"z *= x; return z + y":                  1,
		"return max(x*y, z) + 1":                1,
		"return float64(x*y) + z":               0,
		"return x*y/z":                          0,
		"if x*y > z { return 1 }; return 0":     0,
		"return float64(n*2+1) + float64(-x*y)": 0,
		"return float64(int(x*y)) + z":          0,
		"return (x * y) + z":                    1,
	} {
		fset := token.NewFileSet()
		f, err := parser.ParseFile(fset, "p.go", head+body+"\n}", 0)
		if err != nil {
			t.Fatal(err)
		}
		if got := len(fusible(fset, []*ast.File{f})); got != want {
			t.Errorf("%q: found %d, want %d", body, got, want)
		}
	}
}

// fusible lists products of floats that no conversion protects. Types of other
// packages are not loaded: what they make of a product is skipped.
func fusible(fset *token.FileSet, files []*ast.File) []token.Position {
	info := &types.Info{Types: map[ast.Expr]types.TypeAndValue{}}
	conf := types.Config{Error: func(error) {}, Importer: nothing{}}
	_, _ = conf.Check("p", fset, files, info) // its errors are the missing imports
	float := func(e ast.Expr) bool {
		tv := info.Types[e]
		b, ok := tv.Type.(*types.Basic)
		return tv.Value == nil && ok && b.Info()&types.IsFloat != 0
	}
	var found []token.Position
	for _, f := range files {
		var parents []ast.Node
		ast.Inspect(f, func(n ast.Node) bool {
			if n == nil {
				parents = parents[:len(parents)-1]
				return true
			}
			switch n := n.(type) {
			case *ast.BinaryExpr:
				if n.Op == token.MUL && float(n) && !guarded(info, parents) {
					found = append(found, fset.Position(n.Pos()))
				}
			case *ast.AssignStmt:
				if n.Tok == token.MUL_ASSIGN && float(n.Lhs[0]) {
					found = append(found, fset.Position(n.Pos()))
				}
			}
			parents = append(parents, n)
			return true
		})
	}
	return found
}

// guarded tells whether the nearest node around an expression keeps it from
// being fused.
func guarded(info *types.Info, parents []ast.Node) bool {
	for i := len(parents) - 1; i >= 0; i-- {
		switch p := parents[i].(type) {
		case *ast.ParenExpr:
			continue
		case *ast.UnaryExpr:
			continue
		case *ast.CallExpr:
			return info.Types[p.Fun].IsType() || isConversion(p)
		case *ast.BinaryExpr:
			switch p.Op {
			case token.MUL, token.QUO, token.LSS, token.GTR, token.LEQ, token.GEQ, token.EQL, token.NEQ:
				return true
			}
			return false
		default:
			return false
		}
	}
	return false
}

// isConversion knows the conversions to types of packages that are not loaded.
func isConversion(c *ast.CallExpr) bool {
	s, ok := c.Fun.(*ast.SelectorExpr)
	if !ok {
		return false
	}
	x, ok := s.X.(*ast.Ident)
	return ok && x.Name == "time" && s.Sel.Name == "Duration"
}

type nothing struct{}

func (nothing) Import(path string) (*types.Package, error) { return nil, notLoadedError(path) }

type notLoadedError string

func (e notLoadedError) Error() string { return string(e) + " is not loaded" }

// The core ranges over maps where the order plays no part, and says so; scoring
// and the index have no reason to.
func TestNothingHereRangesOverAMap(t *testing.T) {
	for _, dir := range []string{".", "../prefix"} {
		fset := token.NewFileSet()
		files := sources(t, fset, dir)
		info := &types.Info{Types: map[ast.Expr]types.TypeAndValue{}}
		conf := types.Config{Error: func(error) {}, Importer: nothing{}}
		_, _ = conf.Check("p", fset, files, info)
		for _, f := range files {
			ast.Inspect(f, func(n ast.Node) bool {
				if r, ok := n.(*ast.RangeStmt); ok {
					if tv := info.Types[r.X]; tv.Type != nil {
						if _, isMap := tv.Type.Underlying().(*types.Map); isMap {
							t.Errorf("%s: ranges over a map", fset.Position(r.Pos()))
						}
					}
				}
				return true
			})
		}
	}
}
