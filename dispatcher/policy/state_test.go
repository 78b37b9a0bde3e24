package policy

import (
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"
)

func TestWhatWasLearnedComesBackFromItsState(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l, s, f := NewLengths(), NewSticky(), Fuser{}
		token := rapid.StringN(0, 2, 2)
		for i := range rapid.IntRange(0, 30).Draw(t, "reports") {
			job, group := token.Draw(t, "job"), token.Draw(t, "group")
			l.Learn(job, group, rapid.IntRange(-1, 5000).Draw(t, "tokens"))
			s.Learn(job, token.Draw(t, "trajectory"), group, fmt.Sprint("e", i%3))
			f.Sample(time.Duration(i)*time.Second, &Observed{Running: i, Waiting: i % 3, UsedTokens: int64(i*7 - 1), DecodeTokS: float64(i), MaxRunning: 4}, Reserved{Tokens: 5, Requests: 1})
		}
		l2, s2 := l.State().Lengths(), s.State().Sticky()
		if !reflect.DeepEqual(l.State(), l2.State()) || !reflect.DeepEqual(s.State(), s2.State()) || f.State().Fuser() != f {
			t.Fatal("another one came back")
		}
	})
}

func TestEveryFieldOfWhatIsLearnedIsInItsState(t *testing.T) {
	for of, names := range map[any]string{
		Fuser{}: "tokens requests hasTokens hasRequests at held rates", rates{}: "decode prefill",
		Lengths{}: "groups jobs pool seen", Sticky{}: "trajectories groups",
	} {
		typ := reflect.TypeOf(of)
		for i := range typ.NumField() {
			if f := typ.Field(i).Name; !strings.Contains(" "+names+" ", " "+f+" ") {
				t.Errorf("%s.%s is new: put it into the type's State and take it from there, then name it here", typ, f)
			}
		}
	}
}
