# Manual pages, made by help2man of what the programs themselves say. Programs of a sanitizer's build are not asked.
find_program(BALLAST_HELP2MAN help2man)
mark_as_advanced(BALLAST_HELP2MAN)
if(NOT BALLAST_HELP2MAN OR BALLAST_SANITIZE)
  message(STATUS "Ballast: no manual pages: help2man is ${BALLAST_HELP2MAN}, sanitizer '${BALLAST_SANITIZE}'")
  return()
endif()

# ballast_manual(<program> <section> <one line> [option that prints all help])
function(ballast_manual program section meaning)
  set(help --help)
  if(ARGN)
    set(help ${ARGN})
  endif()
  set(page ${PROJECT_BINARY_DIR}/man/${program}.${section})
  add_custom_command(OUTPUT ${page}
    COMMAND ${CMAKE_COMMAND} -E env LC_ALL=C
            ${BALLAST_HELP2MAN} --no-info --section ${section} --name ${meaning} --help-option=${help} --output ${page}
            $<TARGET_FILE:${program}>
    DEPENDS ${program} VERBATIM)
  add_custom_target(manual_${program} ALL DEPENDS ${page})
  install(FILES ${page} DESTINATION ${CMAKE_INSTALL_MANDIR}/man${section})
endfunction()

file(MAKE_DIRECTORY ${PROJECT_BINARY_DIR}/man)
ballast_manual(ballastd 8 "state server of training jobs")
ballast_manual(ballastctl 1 "look at and tend Ballast state servers" --help-all)
ballast_manual(train_bytes_lm 1 "train a byte-level language model on Ballast state servers")
