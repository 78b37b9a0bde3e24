//go:build image

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rollbus/rollbus/kvstate/natstest"
)

// buildah works without a daemon and, as root, inside of another container too.
// Its store is this test's own.
type buildah struct {
	t   *testing.T
	dir string
}

func (b buildah) command(ctx context.Context, args ...string) *exec.Cmd {
	return exec.CommandContext(ctx, "buildah", append(b.global(), args...)...)
}

func (b buildah) global() []string {
	return []string{"--storage-driver", "vfs", "--root", filepath.Join(b.dir, "store"), "--runroot", filepath.Join(b.dir, "run")}
}

func (b buildah) do(args ...string) string {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	cmd := b.command(ctx, args...)
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		b.t.Fatalf("buildah %v: %v", args, err)
	}
	return strings.TrimSpace(string(out))
}

// newImage builds the image as the documentation does and makes a container of it.
func newImage(t *testing.T) (b buildah, container string) {
	t.Helper()
	if _, err := exec.LookPath("buildah"); err != nil {
		t.Fatalf("%v: install buildah", err)
	}
	b = buildah{t, t.TempDir()}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	name := "rollbus:test"
	build := exec.CommandContext(ctx, "make", "--no-print-directory", "image", "IMAGE="+name,
		"IMAGE_TOOL=buildah "+strings.Join(b.global(), " "))
	build.Dir = "../.."
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("make image: %v\n%s", err, out)
	}
	container = b.do("from", name)
	t.Cleanup(func() { b.do("rm", container) })
	return b, container
}

func TestTheImageHoldsTheProgramItsUserAndCertificatesAndNothingElse(t *testing.T) {
	b, container := newImage(t)
	root := b.do("mount", container)
	var files []string
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			files = append(files, strings.TrimPrefix(path, root))
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if want := []string{"/etc/group", "/etc/passwd", "/etc/ssl/certs/ca-certificates.crt", "/rollbus"}; !slices.Equal(files, want) {
		t.Errorf("the image holds %v, want %v", files, want)
	}
	b.do("umount", container)

	var about struct {
		OCIv1 struct {
			Config struct {
				User            string
				Entrypoint, Cmd []string
			} `json:"config"`
		}
	}
	if err := json.Unmarshal([]byte(b.do("inspect", container)), &about); err != nil {
		t.Fatal(err)
	}
	c := about.OCIv1.Config
	if c.User != "65532:65532" || !slices.Equal(c.Entrypoint, []string{"/rollbus"}) || !slices.Equal(c.Cmd, []string{"help"}) {
		t.Errorf("the image runs %v %v as %q", c.Entrypoint, c.Cmd, c.User)
	}
	if out := b.do("run", "--isolation", "chroot", container, "--", "/rollbus", "version"); !strings.Contains(out, "rollbus") {
		t.Errorf("version prints %q", out)
	}
}

// A dispatcher of the image serves a pool as the image's user, on a root that it
// cannot write, and gives back and ends when it is told to.
func TestADispatcherOfTheImageServesAsItsUser(t *testing.T) {
	b, container := newImage(t)
	node := natstest.Server(t)
	listen := freeAddress(t)
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	cmd := b.command(ctx, "run", "--isolation", "chroot", container, "--", "/rollbus",
		"dispatcher", "--server", node.URL(), "--http", listen)
	var log strings.Builder
	cmd.Stdout, cmd.Stderr = &log, &log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill() // after an orderly end there is nothing to kill
		if t.Failed() {
			t.Log(log.String())
		}
	})
	natstest.Eventually(t, awaitWithin, "/readyz of the dispatcher in the container", func() bool {
		r, err := http.Get("http://" + listen + "/readyz")
		if err != nil {
			return false
		}
		_ = r.Body.Close()
		return r.StatusCode == http.StatusOK
	})
	pid, owner := runsAs(t, "dispatcher\x00--server\x00"+node.URL()+"\x00")
	if owner != 65532 {
		t.Errorf("the dispatcher runs as user %d, want 65532", owner)
	}
	if err := syscall.Kill(pid, syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("the dispatcher did not end in order: %v", err)
	}
}

// runsAs finds the program's own process among those that start it, by how its
// command line goes on.
func runsAs(t *testing.T, rest string) (pid int, user uint32) {
	t.Helper()
	procs, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		t.Fatal(err)
	}
	for _, dir := range procs {
		line, err := os.ReadFile(filepath.Join(dir, "cmdline"))
		if err != nil || !strings.HasPrefix(string(line), "/rollbus\x00"+rest) {
			continue // not it, or gone meanwhile
		}
		info, err := os.Stat(dir)
		if err != nil {
			continue
		}
		if _, err := fmt.Sscanf(filepath.Base(dir), "%d", &pid); err != nil {
			t.Fatal(err)
		}
		return pid, info.Sys().(*syscall.Stat_t).Uid
	}
	t.Fatal("the container's process is nowhere")
	return 0, 0
}
