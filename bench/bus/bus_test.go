package bus

import (
	"context"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestBothSidesAnswerEverythingThatIsSubmitted(t *testing.T) {
	results, err := Run(context.Background(), Config{
		Cases:  []Case{{Storage: jetstream.MemoryStorage, Replicas: 1, Payload: 1024, Dispatchers: 2, Engines: 4}},
		Rounds: 1, Slice: 300 * time.Millisecond, Half: 300 * time.Millisecond, Dir: t.TempDir(),
	})
	if err != nil {
		t.Fatal(err)
	}
	r := results[0]
	if r.Rollouts <= 0 || r.Bare <= 0 || r.Ratio <= 0 || r.P50 <= 0 || r.BareP50 <= 0 || r.P99 < r.P50 || r.CPU <= 0 {
		t.Errorf("a figure is missing: %+v", r)
	}
}

func TestACaseThatCannotBeMeasuredIsRefused(t *testing.T) {
	for _, c := range []Case{
		{Replicas: 2, Payload: 1024, Dispatchers: 1, Engines: 1},
		{Replicas: 1, Payload: 10, Dispatchers: 1, Engines: 1},
		{Replicas: 1, Payload: 1024, Engines: 1},
		{Replicas: 1, Payload: 1024, Dispatchers: 1},
	} {
		if _, err := Run(context.Background(), Config{Cases: []Case{c}}); err == nil {
			t.Errorf("%+v is measured", c)
		}
	}
}

func TestFiguresOfTurns(t *testing.T) {
	two := turns{{n: 100, in: time.Second, cpu: time.Second, refused: 50}, {n: 300, in: time.Second, cpu: time.Second, refused: 150}}
	rate, cpu, refused, each := two.figures()
	if rate != 200 || cpu != 5000 || refused != 0.5 || len(each) != 2 || each[1] != 300 {
		t.Errorf("rate %v, CPU %v us, refused %v, turns %v: want 200, 5000, 0.5, [100 300]", rate, cpu, refused, each)
	}
	if got := percentile([]float64{4, 1, 3, 2}, 0.5); got != 3 {
		t.Errorf("the median of 1 2 3 4 is %v, want 3", got)
	}
	if got := percentile(nil, 0.99); got != 0 {
		t.Errorf("a percentile of nothing is %v", got)
	}
}
