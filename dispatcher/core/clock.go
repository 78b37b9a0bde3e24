package core

import "time"

// serverClock estimates the NATS server's clock: the last sample plus what has
// passed here since. It never goes back, so that an age never shrinks.
type serverClock struct {
	sample int64 // unix ns
	at     time.Duration
	floor  int64
}

func (s *serverClock) observe(unixNano int64, now time.Duration) {
	if unixNano <= 0 {
		return
	}
	// A stamp read from a message is at most as late as the server is now; of
	// two candidates the later one is nearer to the truth.
	if est := s.estimate(now); est == 0 || unixNano > est {
		s.sample, s.at = unixNano, now
	}
}

// resync takes a sample that was read for its time: it may correct an estimate
// that runs ahead; the floor still keeps ages from shrinking.
func (s *serverClock) resync(unixNano int64, now time.Duration) {
	if unixNano <= 0 {
		return
	}
	s.floor = s.estimate(now)
	s.sample, s.at = unixNano, now
}

// estimate is 0 until the first sample.
func (s *serverClock) estimate(now time.Duration) int64 {
	if s.sample == 0 {
		return 0
	}
	return max(s.floor, s.sample+int64(now-s.at))
}

// since is how long ago a server stamp was; 0 when either is unknown or in the future.
func (s *serverClock) since(stamp int64, now time.Duration) time.Duration {
	est := s.estimate(now)
	if est == 0 || stamp <= 0 || est < stamp {
		return 0
	}
	return time.Duration(est - stamp)
}

// contactClock advances only while NATS is proven to be reachable: ages of
// registrations are measured on it, so that an outage of NATS, or a pause of
// this process, makes no engine look dead.
type contactClock struct {
	total time.Duration // proven contact so far
	last  time.Duration // now of the last proof; < 0 before the first
	gap   time.Duration // the longest silence that still counts as contact
}

func (c *contactClock) prove(now time.Duration) {
	if c.last >= 0 {
		if d := now - c.last; d <= c.gap {
			c.total += d
		}
	}
	c.last = now
}
