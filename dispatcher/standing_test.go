package dispatcher

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/rollbus/rollbus/kvstate/natstest"
	"github.com/rollbus/rollbus/subjects"
)

// An engine that is registered and takes no part in decisions is named, and
// keeps the dispatcher from nothing.
func TestReadinessNamesAnEngineThatIsRegisteredAndNotCounted(t *testing.T) {
	b := newBench(t)
	d := b.real()
	srv := httptest.NewServer(d.Handler())
	defer srv.Close()
	a := b.agent("good", 2, nil)
	paused := engine("idle")
	paused.State = subjects.EnginePaused
	if _, err := b.store.PutEngine(b.ctx(), paused); err != nil {
		t.Fatal(err)
	}
	b.publish(subjects.BucketSubject(b.pool.Bucket(subjects.Engines), "odd"), "", nil, []byte(`{"engine":"other"}`))
	says := func(what string, all ...string) {
		t.Helper()
		natstest.Eventually(t, 2*within, what, func() bool {
			code, text := get(t, srv, "/readyz")
			for _, s := range all {
				if !strings.Contains(text, s) {
					return false
				}
			}
			return code == http.StatusOK && !strings.Contains(text, "engine good")
		})
	}
	says("both named", `"what":"engine idle","why":"paused: `, `"what":"engine odd","why":"its registration cannot be read: `)
	a.stop()
	natstest.Eventually(t, 2*within, "a silent engine named", func() bool {
		_, text := get(t, srv, "/readyz")
		return strings.Contains(text, `"what":"engine good"`)
	})
	b.publish(subjects.BucketSubject(b.pool.Bucket(subjects.Engines), "odd"), "", nil, must(json.Marshal(engine("odd"))))
	natstest.Eventually(t, 2*within, "a registration that can be read again", func() bool {
		_, text := get(t, srv, "/readyz")
		return !strings.Contains(text, "cannot be read")
	})
}
