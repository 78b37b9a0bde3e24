package kvstate

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/rollbus/rollbus/subjects"
)

// Checkpoint reads what an engine's agent kept of a rollout's unfinished output,
// from the stream's leader. ErrGone when there is none.
func (s *Store) Checkpoint(ctx context.Context, engine, job, id string) (*subjects.Partial, error) {
	if err := checkKey(engine, job, id); err != nil {
		return nil, fmt.Errorf("read checkpoint: %w", err)
	}
	bucket := s.pool.Bucket(subjects.Partials)
	d, err := s.last(ctx, subjects.BucketStream(bucket), subjects.BucketSubject(bucket, engine+"."+subjects.RolloutKey(job, id)))
	if err != nil {
		return nil, err
	}
	if d.deleted() {
		return nil, fmt.Errorf("%w: the checkpoint of %s on %s was cleared", ErrGone, subjects.RolloutKey(job, id), engine)
	}
	var p subjects.Partial
	if err := json.Unmarshal(d.data, &p); err != nil {
		return nil, fmt.Errorf("%w: the checkpoint of %s on %s: %w", ErrRefused, subjects.RolloutKey(job, id), engine, err)
	}
	return &p, nil
}
