package baseline

import (
	"bufio"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

// Each golden is 20 decisions worked by hand from the description, so that a
// baseline cannot become weaker unseen: "+ session blocks -> engine" is a
// request, "- n" the answer of the n-th.
func TestBaselinesDecideAsTheirDescriptionsSay(t *testing.T) {
	points := map[string]uint64{"0#0": 10, "0#1": 60, "1#0": 30, "1#1": 80, "2#0": 50, "2#1": 90}
	place := func(key string) uint64 {
		if at, ok := points[key]; ok {
			return at
		}
		at, _ := strconv.ParseUint(key, 10, 64)
		return at
	}
	for name, r := range map[string]Router{
		"round_robin":     NewRoundRobin([]int{2, 1, 1}),
		"load_only":       NewLoadOnly([]int{1, 1, 2}, false),
		"sticky_lru":      NewSticky(3, 2),
		"consistent_hash": NewConsistentHash(3, ConsistentHash{Nodes: 2, Bound: 1.25, Hash: place}),
		"cache_aware":     NewCacheAware(3, CacheAware{Threshold: 0.5, Abs: 2, Rel: 1.1, MaxTree: 6}),
	} {
		t.Run(name, func(t *testing.T) { follow(t, name, r) })
	}
}

func follow(t *testing.T, name string, r Router) {
	f, err := os.Open(filepath.Join("testdata", name+".golden"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	type sent struct {
		q  *Request
		at int
	}
	var all []sent
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		text, _, _ := strings.Cut(lines.Text(), "#")
		words := strings.Fields(text)
		switch {
		case len(words) == 0:
		case words[0] == "-":
			n, err := strconv.Atoi(words[1])
			if err != nil {
				t.Fatal(err)
			}
			r.Done(all[n-1].q, all[n-1].at)
		default:
			q := &Request{Session: words[1]}
			for _, w := range words[2 : len(words)-2] {
				b, err := strconv.ParseUint(w, 10, 64)
				if err != nil {
					t.Fatal(err)
				}
				q.Blocks = append(q.Blocks, b)
			}
			at := r.Route(q)
			all = append(all, sent{q, at})
			if want := words[len(words)-1]; strconv.Itoa(at) != want {
				t.Fatalf("decision %d, %s: engine %d, want %s", len(all), strings.TrimSpace(text), at, want)
			}
		}
	}
	if err := lines.Err(); err != nil || len(all) != 20 {
		t.Fatalf("%d decisions, error %v: want 20", len(all), err)
	}
}

func TestEachFamilyHasThreeSettingsThatDiffer(t *testing.T) {
	for _, f := range Families() {
		seen := map[string]bool{}
		for _, s := range f.Settings {
			seen[s.Label] = true
			r := s.Make(Fleet{Slots: []int{4, 8, 4}})
			for i := range 50 {
				q := &Request{Session: strconv.Itoa(i % 7), Tokens: 100 * i, Blocks: []uint64{uint64(i % 3), uint64(i)}}
				if at := r.Route(q); at < 0 || at > 2 {
					t.Errorf("%s, %s: engine %d of 3", f.Name, s.Label, at)
				} else if i%2 == 0 {
					r.Done(q, at)
				}
			}
		}
		if len(seen) != 3 {
			t.Errorf("%s has %d settings, want 3", f.Name, len(seen))
		}
	}
}
