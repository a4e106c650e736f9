/* The first process of the emulated machine: replays on the ISA the boot loader names, says on the serial line how that
   ended, switches off. */
#include <fcntl.h>
#include <stdio.h>
#include <sys/io.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

static void use_serial_line(void) {
  mkdir("/dev", 0755);
  mount("dev", "/dev", "devtmpfs", 0, NULL);
  int line = open("/dev/ttyS0", O_RDWR);
  for (int i = 0; i < 3; i++) {
    dup2(line, i);
  }
}

/* Bochs ends when this word arrives at its port 0x8900. */
static void switch_off(void) {
  ioperm(0x8900, 1, 1);
  for (const char *c = "Shutdown"; *c; c++) {
    outb(*c, 0x8900);
  }
}

int main(int argc, char **argv) {
  use_serial_line();
  printf("replay begins\n");
  fflush(stdout);
  pid_t child = fork();
  if (!child) {
    execl("/replay", "/replay", "/recording", argv[argc - 1], NULL);
    _exit(127);
  }
  int status;
  waitpid(child, &status, 0);
  printf("replay ended with status %d, signal %d\n", WEXITSTATUS(status), WTERMSIG(status));
  fflush(stdout);
  tcdrain(1);
  switch_off();
  for (;;) {
    pause();
  }
}
