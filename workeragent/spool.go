package workeragent

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"

	"github.com/rollbus/rollbus/subjects"
)

// spooled is a finished answer that is not stored yet, with what is needed to
// store it and to release its key.
type spooled struct {
	Engine   string            `json:"engine"`
	Revision uint64            `json:"revision"`
	Answer   subjects.Answer   `json:"answer"`
	Released subjects.Released `json:"released"`
	Result   *subjects.Result  `json:"result"`

	bytes int64
	file  string // "" = not on disk
}

// spool accounts for finished answers until they are stored, and keeps those
// whose first attempt failed on disk when a directory is given.
type spool struct {
	most int64
	dir  string

	mu    sync.Mutex
	bytes int64
	count int
}

// Bounds of what is read back at a start.
const (
	maxSpoolFiles = 16384
	maxSpoolFile  = 64 << 20
)

func newSpool(most int64, dir string) (*spool, error) {
	if dir != "" {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return nil, fmt.Errorf("spool directory: %w: give a directory that the agent may write to", err)
		}
	}
	return &spool{most: most, dir: dir}, nil
}

// sizeOf estimates an answer's bytes in memory and on the wire.
func sizeOf(r *subjects.Result) int64 {
	n := 1024 + len(r.Text) + 8*len(r.TokenIDs) + len(r.Logprobs) + len(r.Meta) + 128*len(r.Segments)
	for k, v := range r.Extra {
		n += len(k) + len(v)
	}
	return int64(n)
}

// over tells whether nothing new may be taken.
func (s *spool) over() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.bytes > s.most
}

func (s *spool) account(e *spooled, in bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if in {
		e.bytes = sizeOf(e.Result)
		s.bytes += e.bytes
		s.count++
		return
	}
	s.bytes -= e.bytes
	s.count--
}

func (s *spool) figures() (count int, bytes int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.count, s.bytes
}

// spooling counts an answer in or out; engines are registered as paused while
// the spool is over its bound.
func (a *Agent) spooling(e *spooled, in bool) {
	was := a.spool.over()
	a.spool.account(e, in)
	is := a.spool.over()
	if was == is {
		return
	}
	if is {
		a.log.Warn("the spool is over its bound: nothing new is taken until answers can be stored", "bytes", a.cfg.SpoolBytes)
	}
	for _, u := range a.units {
		u.mu.Lock()
		u.spooling = is
		u.mu.Unlock()
		kick(u.kickReg)
	}
}

// name is a file name for an answer; job and id may be too long for one.
func (s *spool) name(e *spooled) string {
	sum := sha256.Sum256([]byte(e.Answer.Key() + "#" + strconv.Itoa(e.Answer.Bind)))
	return filepath.Join(s.dir, e.Engine+"."+hex.EncodeToString(sum[:16])+".json")
}

// keep writes an answer to disk once: a temporary file first, so that what is
// read back is whole.
func (s *spool) keep(e *spooled) error {
	if s.dir == "" || e.file != "" {
		return nil
	}
	b, err := json.Marshal(e)
	if err != nil {
		return err
	}
	path := s.name(e)
	f, err := os.OpenFile(path+".tmp", os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	err = errors.Join(err, f.Sync(), f.Close())
	if err == nil {
		err = os.Rename(path+".tmp", path)
	}
	if err != nil {
		_ = os.Remove(path + ".tmp")
		return err
	}
	e.file = path
	return nil
}

func (s *spool) remove(e *spooled) {
	if e.file != "" {
		_ = os.Remove(e.file) // what stays is offered again and found superseded
		e.file = ""
	}
}

// load reads back what an earlier agent left for an engine. Broken files are
// named and left where they are.
func (s *spool) load(engine string) (out []*spooled, err error) {
	if s.dir == "" {
		return nil, nil
	}
	names, err := os.ReadDir(s.dir)
	if err != nil {
		return nil, err
	}
	var errs []error
	for _, n := range names {
		if !strings.HasPrefix(n.Name(), engine+".") || !strings.HasSuffix(n.Name(), ".json") || len(out) >= maxSpoolFiles {
			continue
		}
		path := filepath.Join(s.dir, n.Name())
		e, err := readSpooled(path)
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w: look at it and remove it", path, err))
			continue
		}
		if e.Engine == engine {
			e.file = path
			out = append(out, e)
		}
	}
	return out, errors.Join(errs...)
}

func readSpooled(path string) (*spooled, error) {
	info, err := os.Stat(path)
	switch {
	case err != nil:
		return nil, err
	case info.Size() > maxSpoolFile:
		return nil, fmt.Errorf("it has %d bytes, more than any answer", info.Size())
	}
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var e spooled
	if err := json.Unmarshal(b, &e); err != nil {
		return nil, err
	}
	if e.Result == nil || e.Answer.Job == "" || e.Answer.ID == "" {
		return nil, errors.New("it holds no answer")
	}
	return &e, nil
}

// recover offers what an earlier agent of this engine could not store, before
// the keys are followed: what is answered is not returned then. It waits a
// little; what takes longer goes on beside the rest.
func (u *unit) recover(ctx context.Context) {
	left, err := u.a.spool.load(u.name)
	if err != nil {
		u.log.Warn("part of the spool cannot be read", "error", err)
	}
	if len(left) == 0 {
		return
	}
	u.log.Info("answers of an earlier agent are offered", "count", len(left))
	done := make(chan struct{})
	u.wg.Go(func() {
		defer close(done)
		for _, e := range left {
			u.a.spooling(e, true)
			end := u.commit(e)
			u.a.spooling(e, false)
			switch end {
			case commitKilled:
				return
			case commitSuperseded:
				e.Released.Outcome = subjects.OutcomeSuperseded
			}
			u.release(e.Released, e.Revision)
		}
	})
	wait, cancel := context.WithTimeout(ctx, 3*u.a.t.StoreTimeout)
	defer cancel()
	select {
	case <-done:
	case <-wait.Done():
	}
}
