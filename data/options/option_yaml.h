/* option_yaml.h: options in a YAML file. */
#ifndef MT_OPTION_YAML_H
#define MT_OPTION_YAML_H

#include "option_reader.h"
#include "yaml.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Reads a YAML file as mt_options_read_yaml does; refusals wait for mt_option_reader_report. */
int mt_option_reader_read_yaml(mt_option_reader *reader, mt_yaml *yaml);

#ifdef __cplusplus
}
#endif
#endif
