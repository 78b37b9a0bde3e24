package faults

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
)

// process is a real program, which may be struck and started again. Whoever
// holds turn may do so.
type process struct {
	name string
	bin  string
	args []string
	env  []string
	log  *os.File
	turn chan struct{}
	// crashed is told of an end that nobody asked for.
	crashed func(name string, err error)

	mu     sync.Mutex
	cmd    *exec.Cmd
	asked  bool // its end was asked for
	waited chan struct{}
}

func newProcess(dir, name, bin string, args, env []string, crashed func(string, error)) (*process, error) {
	log, err := os.OpenFile(filepath.Join(dir, name+".log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	return &process{name: name, bin: bin, args: args, env: env, log: log, turn: make(chan struct{}, 1), crashed: crashed}, nil
}

func (p *process) start() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cmd = exec.Command(p.bin, p.args...) //nolint:noctx // it is ended by hand, with a signal
	p.cmd.Stdout, p.cmd.Stderr = p.log, p.log
	p.cmd.Env = append(os.Environ(), p.env...)
	// A group of its own: an interrupt at the terminal is for the script, which ends them.
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := p.cmd.Start(); err != nil {
		return fmt.Errorf("start %s: %w", p.name, err)
	}
	p.asked = false
	cmd, waited := p.cmd, make(chan struct{})
	p.waited = waited
	go func() {
		err := cmd.Wait()
		p.mu.Lock()
		asked := p.asked
		p.mu.Unlock()
		close(waited)
		if !asked {
			p.crashed(p.name, err)
		}
	}()
	return nil
}

// end sends SIGKILL, or SIGTERM when soft, and returns when the process is no more.
func (p *process) end(soft bool) {
	p.mu.Lock()
	waited := p.waited
	if waited != nil {
		p.asked = true
		sig := syscall.SIGKILL
		if soft {
			sig = syscall.SIGTERM
		}
		_ = p.cmd.Process.Signal(sig) // gone already: so much the better
	}
	p.mu.Unlock()
	if waited != nil {
		<-waited
	}
}

func (p *process) signal(sig syscall.Signal) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.cmd.Process.Signal(sig)
}

func (p *process) close() {
	p.end(false)
	_ = p.log.Close() // its text is for people only
}
