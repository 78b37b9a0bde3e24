package explore

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"
)

// ErrScene says that a scene cannot be explored.
var ErrScene = errors.New("not a scene that can be explored")

// Result of an exploration.
type Result struct {
	Scene       string   `json:"scene"`
	Mutation    Mutation `json:"mutation,omitempty"`
	Dispatchers int      `json:"dispatchers"`
	Engines     int      `json:"engines"`
	Keys        int      `json:"keys"`
	Rollouts    int      `json:"rollouts"`
	States      int      `json:"states"`      // different ones visited
	Transitions int      `json:"transitions"` // moves made
	Depth       int      `json:"depth"`       // moves from the start, at most
	Whole       bool     `json:"whole"`       // there is nothing beyond: no bound was met
	Rested      int      `json:"rested"`      // states from which the world was left alone until it rested
	CoreStates  int      `json:"core_states"` // different states of cores
	CoreSteps   int      `json:"core_steps"`
	Broken      string   `json:"broken,omitempty"` // the rule, a sentence
	Trace       []string `json:"trace,omitempty"`  // the moves that broke it
	Seconds     float64  `json:"seconds"`
}

// Progress is told of each finished depth.
type Progress func(depth, states, frontier int)

type visited struct {
	from int32
	m    move
}

type explorer struct {
	x      *world
	ctx    context.Context
	seen   map[digest]int32
	log    []visited
	rests  map[digest]bool // states from which the world comes to rest
	buf    []byte
	result Result
}

// Run explores a scene breadth first, until a rule is broken, nothing is new, or
// a bound is met.
func Run(ctx context.Context, sc Scene, progress Progress) (Result, error) {
	if err := sc.check(); err != nil {
		return Result{}, fmt.Errorf("%w: %w", ErrScene, err)
	}
	return run(ctx, newWorld(sc), progress)
}

func run(ctx context.Context, x *world, progress Progress) (Result, error) {
	start, sc := time.Now(), x.scene
	e := &explorer{x: x, ctx: ctx, seen: map[digest]int32{}, rests: map[digest]bool{}}
	e.result = Result{Scene: sc.Name, Mutation: sc.Mutation, Dispatchers: sc.Dispatchers, Engines: sc.Engines, Keys: max(1, sc.Keys), Rollouts: sc.all()}
	err := e.run(progress)
	r := &e.result
	r.States, r.CoreStates, r.CoreSteps, r.Seconds = len(e.seen), len(e.x.cores.states), e.x.cores.steps, time.Since(start).Seconds()
	if err == nil {
		err = e.x.cores.err
	}
	return *r, err
}

func (e *explorer) run(progress Progress) error {
	sc := &e.x.scene
	first := e.x.begin()
	e.note(first, -1, move{})
	frontier := []*state{first}
	ids := []int32{0}
	var moves []move
	for depth := 0; len(frontier) > 0; depth++ {
		if progress != nil {
			progress(depth, len(e.seen), len(frontier))
		}
		e.result.Depth = depth
		if sc.MaxDepth > 0 && depth == sc.MaxDepth {
			return nil
		}
		var next []*state
		var nextIDs []int32
		for i, s := range frontier {
			if err := context.Cause(e.ctx); err != nil {
				return err
			}
			if sc.MaxStates > 0 && len(e.seen) >= sc.MaxStates {
				return nil
			}
			moves = e.x.moves(s, moves[:0])
			for _, m := range moves {
				n := e.x.after(s, m)
				e.result.Transitions++
				id, fresh := e.note(n, ids[i], m)
				if e.x.broken != "" {
					e.blame(append(e.path(ids[i]), m), nil)
					return nil
				}
				if !fresh {
					continue
				}
				if int(id)%max(1, sc.RestEvery) == 0 {
					if rest := e.rest(n); e.x.broken != "" {
						e.blame(e.path(id), rest)
						return nil
					}
				}
				next, nextIDs = append(next, n), append(nextIDs, id)
			}
			frontier[i] = nil
		}
		frontier, ids = next, nextIDs
	}
	e.result.Whole = true
	return nil
}

// note remembers a state; fresh is false when it was seen before.
func (e *explorer) note(s *state, from int32, m move) (id int32, fresh bool) {
	var k digest
	k, e.buf = s.digest(e.buf)
	if id, ok := e.seen[k]; ok {
		return id, false
	}
	id = int32(len(e.log))
	e.seen[k] = id
	e.log = append(e.log, visited{from, m})
	return id, true
}

func (e *explorer) path(id int32) []move {
	var out []move
	for ; id > 0; id = e.log[id].from {
		out = append(out, e.log[id].m)
	}
	for i, j := 0, len(out)-1; i < j; i, j = i+1, j-1 {
		out[i], out[j] = out[j], out[i]
	}
	return out
}

// blame tells the moves that led to a broken rule.
func (e *explorer) blame(path, alone []move) {
	e.result.Broken, e.x.broken = e.x.broken, ""
	s := e.x.begin()
	for i, m := range append(path, alone...) {
		mark := ""
		if i >= len(path) {
			mark = "left alone: "
		}
		e.result.Trace = append(e.result.Trace, mark+e.x.describe(s, m))
		s = e.x.after(s, m)
	}
	e.x.broken = ""
}

// maxAlone bounds the moves of a world that is left alone.
const maxAlone = 400

// rest leaves the world alone: nothing fails, all that is on its way arrives,
// runs complete, time passes; nobody that is dead comes back as long as one is
// alive. It must come to rest, and have left nothing.
func (e *explorer) rest(s *state) (made []move) {
	x := e.x
	var path []digest
	e.result.Rested++
	ticked := [maxDispatchers]bool{}
	passed := 0
	for range maxAlone {
		var k digest
		k, e.buf = s.digest(e.buf)
		if e.rests[k] {
			break
		}
		path = append(path, k)
		m, ok := x.next(s, ticked)
		if !ok {
			if passed == 2 {
				x.judgeRest(s)
				break
			}
			passed++
			m = move{kind: movePass}
		}
		made = append(made, m)
		before := s.cores
		s = x.after(s, m)
		if x.broken != "" {
			return made
		}
		switch {
		case m.kind == moveTick && s.cores == before:
			ticked[m.who] = true
		case m.kind == movePass || m.kind == moveTick:
			ticked = [maxDispatchers]bool{}
		default:
			ticked, passed = [maxDispatchers]bool{}, 0
		}
		if len(made) == maxAlone {
			x.breaks("the world does not come to rest within %d moves when it is left alone", maxAlone)
			return made
		}
	}
	if x.broken == "" {
		for _, k := range path {
			e.rests[k] = true
		}
	}
	return made
}

// next is the first move of a world that is left alone; false when only time is left.
func (x *world) next(s *state, ticked [maxDispatchers]bool) (move, bool) {
	alive := false
	for _, c := range s.cores[:x.scene.Dispatchers] {
		alive = alive || c >= 0
	}
	if !alive {
		return move{kind: moveBegin}, true
	}
	var best move
	found := false
	for _, m := range x.moves(s, nil) {
		switch {
		case m.kind >= quiet || m.kind == movePass || m.kind == moveBegin:
		case m.kind == moveTick && ticked[m.who]:
		case !found || m.kind < best.kind:
			best, found = m, true
		}
	}
	return best, found
}

// String is one line for people.
func (r Result) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s: %d dispatchers x %d engines x %d keys, %d rollouts: %d states, %d moves, depth %d", r.Scene, r.Dispatchers, r.Engines, r.Keys, r.Rollouts, r.States, r.Transitions, r.Depth)
	if r.Whole {
		b.WriteString(" (whole)")
	}
	if r.Broken != "" {
		fmt.Fprintf(&b, "; BROKEN: %s", r.Broken)
	}
	return b.String()
}
