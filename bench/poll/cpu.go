package poll

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"time"
)

// ProcessCPU reads the CPU time of a process: nanoseconds of each of its threads,
// where /proc/<pid>/stat would count in hundredths of a second.
func ProcessCPU(pid int) func() (time.Duration, error) {
	pattern := filepath.Join("/proc", strconv.Itoa(pid), "task", "*", "schedstat")
	return func() (time.Duration, error) {
		files, err := filepath.Glob(pattern)
		if err != nil || len(files) == 0 {
			return 0, fmt.Errorf("CPU time of process %d: no %s: the process has ended, or this kernel does not tell", pid, pattern)
		}
		var sum time.Duration
		for _, f := range files {
			b, err := os.ReadFile(f)
			if err != nil {
				continue // the thread has ended meanwhile
			}
			first, _, _ := bytes.Cut(b, []byte(" "))
			ns, err := strconv.ParseInt(string(first), 10, 64)
			if err != nil {
				return 0, fmt.Errorf("CPU time of process %d: %w", pid, err)
			}
			sum += time.Duration(ns)
		}
		return sum, nil
	}
}
