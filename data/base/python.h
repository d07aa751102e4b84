/* python.h: programs in Python that run beside this one: chat templates in Jinja, files of Parquet. */
#ifndef MT_PYTHON_H
#define MT_PYTHON_H

#include "../../megatron.h"
#include "child.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    MT_PYTHON_LACKS = 3,  // exit status of a program whose packages are absent
    MT_PYTHON_WAIT = 600, // seconds to wait for output, beyond the program's own work: the machine may be busy
};

/* Starts a program, the text `program` with one argument, in the Python of MT_PYTHON; without that variable in
 * python3, and, where that lacks a package, in the distribution's. The program writes one line feed when its packages
 * are loaded. Returns 0 with `child` started; 1 if no Python has what the program needs; -1 with error. `path` is the
 * file that needs it and `purpose` what is done with it, such as "read the file", for messages. */
int mt_python_start(mt_child *child, const char *program, const char *argument, const char *path, const char *purpose,
                    mt_error *error);

/* " for MT_PYTHON=X", for the message that names the package to install; "" without that variable. */
const char *mt_python_choice(char text[200]);

#ifdef __cplusplus
}
#endif
#endif
