package subjects_test

import (
	"errors"
	"regexp"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/rollbus/rollbus/subjects"
)

func TestATokenIsWhatASubjectCanCarryAndNothingElse(t *testing.T) {
	good := regexp.MustCompile(`^[a-z0-9-][a-z0-9_-]{0,127}$`)
	check := func(t interface{ Fatalf(string, ...any) }, v string) {
		err := subjects.CheckToken("job", v)
		if (err == nil) != good.MatchString(v) {
			t.Fatalf("%q: %v", v, err)
		}
		if err != nil && (!errors.Is(err, subjects.ErrBadName) || !strings.Contains(err.Error(), "job")) {
			t.Fatalf("%q: the error does not name the field: %v", v, err)
		}
	}
	for _, v := range []string{"", "a", "_a", "-", "A", "a.b", "a b", "a*", ">", "ä", "a\n", strings.Repeat("x", 128), strings.Repeat("x", 129)} {
		check(t, v)
	}
	rapid.Check(t, func(t *rapid.T) { check(t, rapid.String().Draw(t, "v")) })
}

func TestSubjectsReadBackWhatWasWritten(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p, err := subjects.NewPool(token().Draw(t, "pool"))
		if err != nil {
			t.Fatal(err)
		}
		job, id, third := token().Draw(t, "job"), token().Draw(t, "id"), token().Draw(t, "third")
		lane := rapid.SampledFrom(subjects.Lanes[:]).Draw(t, "lane")
		if e, j, i, ok := p.ParseReservationSubject(p.ReservationSubject(third, job, id)); !ok || e != third || j != job || i != id {
			t.Fatal("reservation", e, j, i, ok)
		}
		if j, r, i, ok := p.ParseResultSubject(p.Result(job, third, id)); !ok || j != job || r != third || i != id {
			t.Fatal("result", j, r, i, ok)
		}
		if j, l, ok := p.ParseSubmitSubject(p.Submit(job, lane)); !ok || j != job || l != lane {
			t.Fatal("submit", j, l, ok)
		}
		if j, ok := p.ParseRetrySubject(p.RetrySubject(job)); !ok || j != job {
			t.Fatal("retry", j, ok)
		}
		if j, i, ok := subjects.SplitRolloutKey(subjects.RolloutKey(job, id)); !ok || j != job || i != id {
			t.Fatal("key", j, i, ok)
		}
	})
}

func TestForeignSubjectsAreNotRead(t *testing.T) {
	p := pool(t, "p")
	for _, s := range []string{"", "rollout.p", "rollout.q.submit.j.normal", "rollout.p.submit.j", "rollout.p.submit.j.fast", "rollout.p.submit.j.normal.x", "rollout.p.submit..normal"} {
		if _, _, ok := p.ParseSubmitSubject(s); ok {
			t.Errorf("%q was read as a submit", s)
		}
	}
	for _, s := range []string{"rollout.p.result.j.main", "rollout.p.result.j.main.1.2", "rollout.q.result.j.main.1"} {
		if _, _, _, ok := p.ParseResultSubject(s); ok {
			t.Errorf("%q was read as a result", s)
		}
	}
	for _, s := range []string{"$KV.rollbus_p_reservations.e.j", "$KV.rollbus_q_reservations.e.j.1"} {
		if _, _, _, ok := p.ParseReservationSubject(s); ok {
			t.Errorf("%q was read as a reservation", s)
		}
	}
}

func TestALaneFollowsFromPriorityAndTurn(t *testing.T) {
	n := func(v int) *int { return &v }
	for _, c := range []struct {
		priority *int
		turn     int
		want     subjects.Lane
	}{
		{nil, 0, subjects.LaneNormal}, {n(0), 1, subjects.LaneNormal}, {nil, 2, subjects.LaneContinue}, {n(0), 2, subjects.LaneContinue},
		{n(-1), 2, subjects.LaneUrgent}, {n(5), 2, subjects.LaneBatch}, {n(5), 0, subjects.LaneBatch},
	} {
		r := subjects.Request{Priority: c.priority}
		if c.turn > 0 {
			r.Trajectory = &subjects.Trajectory{ID: "t", Turn: c.turn}
		}
		if got := r.Lane(); got != c.want {
			t.Errorf("priority %v turn %d: %s, want %s", c.priority, c.turn, got, c.want)
		}
	}
}

func TestACancelsKeyIsAlwaysAKey(t *testing.T) {
	valid := regexp.MustCompile(`^[-/_=.a-zA-Z0-9]+$`)
	seen := map[string]string{}
	for _, v := range []string{"g1", "Group 1", "a.b", "ä", strings.Repeat("x", 500), "group 1", "", "*", "_d"} {
		k := subjects.Cancel{Kind: subjects.CancelGroup, Job: "j", Value: v}.Key()
		if !valid.MatchString(k) || strings.HasSuffix(k, ".") || strings.Contains(k, "..") {
			t.Errorf("%q makes the key %q", v, k)
		}
		if other, twice := seen[k]; twice {
			t.Errorf("%q and %q share the key %q", v, other, k)
		}
		seen[k] = v
	}
	if k := (subjects.Cancel{Kind: subjects.CancelID, Job: "j", Value: "0001"}).Key(); k != "id.j.0001" {
		t.Errorf("a plain id: %q", k)
	}
	if k := (subjects.Cancel{Kind: subjects.CancelJob, Job: "j", Value: "ignored"}).Key(); k != "job.j" {
		t.Errorf("a job: %q", k)
	}
}
