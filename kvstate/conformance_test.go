package kvstate

import (
	"testing"

	"github.com/nats-io/nats.go/jetstream"
)

func TestMemoryR1Conforms(t *testing.T) {
	t.Parallel()
	runConformance(t, single(t, jetstream.MemoryStorage))
}

func TestFileR1Conforms(t *testing.T) {
	t.Parallel()
	runConformance(t, single(t, jetstream.FileStorage))
}

func TestR3Conforms(t *testing.T) {
	t.Parallel()
	runConformance(t, clustered(t))
}

// runConformance is what every kind of NATS must do alike. The subtests share
// one pool and use engines, jobs and ids of their own.
func runConformance(t *testing.T, e *env) {
	for _, c := range []struct {
		name string
		run  func(*testing.T, *env)
	}{
		{"what the simulator's model promises too", sharedStories},
		{"a bind carries everything and gives it back", bindRoundTrip},
		{"a bind overwrites a returned key", bindOverwritesReturned},
		{"a release that was done before changes nothing", releaseTwice},
		{"a return needs the revision held", returnNeedsRevision},
		{"a reservation expires", reservationExpires},
		{"an external reservation is renewed at its revision", externalRenewed},
		{"a seed and its bind are written together or not at all", seedBothOrNone},
		{"a seed without an answer is repeated until it is answered", unknownSeed},
		{"a seed ends at its revision alone", seedEndsOnce},
		{"one live seed a key, whoever races for it", seedRace},
		{"owners are compared and set, and expire", ownersGuarded},
		{"names that cannot stand in a subject are refused", badNames},
		{"the first answer wins", firstAnswerWins},
		{"a received answer stays and has no body", receivedStays},
		{"a requeue stands once", requeueOnce},
		{"the dead are kept whole", deadWhole},
		{"registrations end and are deleted by their writers only", registrations},
		{"settings change from the revision that was read", settingsGuarded},
		{"a cancel is refused where it cannot stand", cancels},
		{"a bind without an answer is repeated until it is answered", unknownBind},
		{"an answer without acknowledgement is found again", unknownCommit},
		{"what was not sent is unavailable", notSent},
		{"a full bucket takes releases and returns, no binds", fullBucket},
		{"a follower of an empty bucket gets an empty view", followEmpty},
		{"a follower gets the view, then the changes, in order", followChanges},
		{"a follower with a filter sees what matches", followFilter},
		{"followers of values decode them", followValuesDecode},
		{"what does not decode is gone and reported", followBad},
		{"the register is followed", followRegister},
		{"a follower starts over when its consumer is deleted", consumerDeleted},
		{"a follower stopped while reservations retire shows none of them afterwards", followerStopped},
		{"a follower that loses its line leaves no consumers behind", noOrphans},
		{"an agent takes over the consumer of its engine", ownFollower},
		{"a restart in mid-follow shows what there is then", restartMidFollow},
	} {
		t.Run(c.name, func(t *testing.T) { c.run(t, e) })
	}
}
