// SIGBUS handler for memory-mapped checkpoint files: reading a mapping beyond the end of a truncated file is a bus error,
// which would end the process without a message.
#pragma once

#include <signal.h>
#include <unistd.h>

#include <cstring>
#include <string>

namespace {

char exit_message[256];
struct sigaction previous_action;

void on_bus_error(int, siginfo_t* info, void*) {
  if (info->si_code == BUS_ADRERR) {
    (void)!write(2, exit_message, strlen(exit_message));
    _exit(2);
  }
  // Other causes go to the previous handler: the fault recurs at once, unless the signal was sent.
  sigaction(SIGBUS, &previous_action, nullptr);
  if (info->si_code <= 0) raise(SIGBUS);
}

// Makes a read beyond the end of a mapped file write `message` to standard error and exit with status 2, as for a user
// error. Python's faulthandler, if enabled, still handles all other bus errors.
void install_sigbus_handler(std::string message) {
  const bool installed = exit_message[0] != 0;
  strncpy(exit_message, message.c_str(), sizeof exit_message - 1);
  if (installed) return;
  struct sigaction action = {};
  action.sa_sigaction = on_bus_error;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGBUS, &action, &previous_action);
}

}  // namespace
